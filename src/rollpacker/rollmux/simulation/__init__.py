"""The scheduler over simulated time: forecasts, baselines, the paper's results.

No decision is made here that the scheduler makes.
"""
