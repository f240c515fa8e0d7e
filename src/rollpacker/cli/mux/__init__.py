"""``rollpacker mux``: commands that speak HTTP to a daemon, and ``serve`` and ``simulate``."""
