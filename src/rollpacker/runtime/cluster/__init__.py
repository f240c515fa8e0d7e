"""The machines of a run, and the start of its workers there."""
