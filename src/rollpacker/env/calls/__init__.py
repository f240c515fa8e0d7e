"""Calls of tools: parsed from text, checked against schemas, made."""
