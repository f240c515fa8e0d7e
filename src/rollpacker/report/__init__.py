"""What a run looks like: HTML report, timeline, plots.

Reports read what runs left behind: they know no running job.
"""
