"""Prompts: hub datasets, files of other frameworks, procedural tasks.

Nothing here knows models or rewards; prompts become tokens by the tokenizer that is given.
"""
