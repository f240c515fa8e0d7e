"""How long things take on which machine.

Nothing here knows policies or steps.
"""
