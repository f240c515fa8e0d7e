"""Prompts: hub datasets, files of other frameworks, procedural tasks."""
