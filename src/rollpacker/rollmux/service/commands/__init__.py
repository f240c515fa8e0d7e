"""What each request does: checked against the state, recorded, answered.

Nothing here knows how a request came.
"""
