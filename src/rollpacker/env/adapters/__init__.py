"""Environments made for other trainers, one file for each kind; imported where one is used.

Nothing outside knows those trainers' names for things.
"""
