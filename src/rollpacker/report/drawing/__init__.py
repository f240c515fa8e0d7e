"""Plots and pages from plain data, without reading a run's files."""
