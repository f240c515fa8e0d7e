"""Environments: they answer the model between two turns of a response. Environments know no engine,
policy or trainer."""
