"""Emulated workers: they are told what real ones are told, and report the same."""
