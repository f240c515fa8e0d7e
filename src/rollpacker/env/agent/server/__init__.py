"""OpenAI's chat API on this machine, for programs.

Nothing here starts a program.
"""
