"""Environments in processes that may die."""
