"""The daemon's HTTP side: the application, its limits, and access control."""
