"""Programs that speak OpenAI's chat API, as environments: one program per response.

The process of environments loads ``factory``. ``environment`` is one episode. The program talks to
``server`` in the same event loop. ``reaper`` ends programs whose process of environments was
killed.
"""
