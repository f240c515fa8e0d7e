"""The daemon's HTTP side: the application, its limits, who may ask.

Nothing here decides about jobs.
"""
