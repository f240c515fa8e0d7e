"""Programs that speak OpenAI's chat API, as environments: a program a response, started as it is.

``factory`` is what the process of environments loads, ``environment`` one response's episode. The
program (``program``) talks to a server in the same event loop (``server``), ``outcome`` reads what
it prints, and ``reaper`` ends what it leaves when the whole process of environments is killed.
"""
