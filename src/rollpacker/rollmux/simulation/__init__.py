"""The scheduler in simulated time: forecasts, baselines, and the paper's results."""
