"""Rewards: functions that score responses, run in processes that may die.

A reward knows no engine and no policy: the judge is given its model by its options.
"""
