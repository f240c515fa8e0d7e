"""OpenAI's chat API on this machine, for programs. ``endpoint``, over ``http``, finds a program's
``session`` by its key. The session compares the program's messages with the conversation so far."""
