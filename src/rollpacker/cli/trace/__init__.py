"""``rollpacker trace``."""
