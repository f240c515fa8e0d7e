"""The real driver: processes, clocks, files. Policies make its decisions."""
