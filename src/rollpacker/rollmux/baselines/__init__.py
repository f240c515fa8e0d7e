"""Policies to compare with, one file each."""
