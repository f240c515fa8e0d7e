"""``rollpacker mux``.

It speaks to a daemon over HTTP; only ``serve`` and ``simulate`` know more of it.
"""
