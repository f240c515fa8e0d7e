"""Questions about a job or a checkpoint that train nothing.

Nothing here changes a run.
"""
