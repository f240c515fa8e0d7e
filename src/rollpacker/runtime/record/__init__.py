"""The files of a run, and its progress on the terminal."""
