"""What a run looks like: HTML report, timeline, plots."""
