"""Logs of trainers: a table of their keys, and one reader of all of them."""
