"""From a program's bytes to the result of a test, in the trainer's process."""
