"""OpenAI's chat API on this machine, for programs. Nothing here starts a program.

``endpoint``, over ``http``, finds a program's ``session`` by its key; the session compares what the
program says with what was said.
"""
