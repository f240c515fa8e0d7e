"""Rewards: functions that score responses, run in processes that may die. A reward knows no engine
and no policy. The judge gets its model from its options."""
