"""A step or an evaluation: decisions become messages, and reports become events."""
