"""One attempt at a prompt: its text, its conversation, its reward, its row in the table of samples.

Nothing here decides, and nothing here knows the workers.
"""
