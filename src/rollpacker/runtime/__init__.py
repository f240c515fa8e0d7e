"""The real driver: processes, clocks, files."""
