"""The scheduler: events in, decisions out. It has no clock and no I/O."""
