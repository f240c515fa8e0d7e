"""Whether a job fits: arithmetic on shapes, no simulation.

Nothing here is loaded or allocated.
"""
