"""Parts of a run's report, one a file.

Nothing here reads files of a run.
"""
