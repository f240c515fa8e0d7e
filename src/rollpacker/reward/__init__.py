"""Rewards: functions that score responses, run in processes that may die."""
