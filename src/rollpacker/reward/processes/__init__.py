"""Grading in processes that may die."""
