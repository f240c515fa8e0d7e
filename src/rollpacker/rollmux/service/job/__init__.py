"""``rollpacker train`` under the daemon: submission, phases and nodes."""
