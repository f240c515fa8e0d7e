"""``rollpacker train`` under the daemon: its phases, its nodes, its way in.

Nothing here knows the daemon's inside.
"""
