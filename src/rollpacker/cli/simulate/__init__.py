"""``rollpacker simulate``, ``estimate``, ``calibrate`` and ``reproduce``."""
