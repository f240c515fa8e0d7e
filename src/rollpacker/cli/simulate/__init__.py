"""``rollpacker simulate``, ``estimate``, ``calibrate`` and ``reproduce``.

It prints what ``sim`` finds out.
"""
