"""HTML reports, timelines and plots of finished runs, from their files."""
