"""Configurations read and changed by people: files, overrides, mistakes, secrets.

No key is defined here.
"""
