"""``rollpacker trace``.

It prints what ``polytrace`` and ``trace_replay`` find out.
"""
