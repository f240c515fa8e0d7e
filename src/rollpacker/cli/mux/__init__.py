"""``rollpacker mux``."""
