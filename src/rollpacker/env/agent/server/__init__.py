"""OpenAI's chat API on this machine, for programs.

Nothing here starts a program.

``endpoint``, over ``connection`` and ``http``, finds a program's ``session`` by its key;
``conversation`` compares what it says with what was said, ``replies`` writes what it reads.
"""
