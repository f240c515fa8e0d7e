"""One attempt at a prompt: its text, conversation, reward and row in the table of samples."""
