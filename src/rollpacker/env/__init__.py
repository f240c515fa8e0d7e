"""Environments: what answers the model between two turns of a response."""
