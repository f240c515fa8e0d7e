"""How a token is drawn from logits, the same in numpy and torch.

It must not know an engine, a request or a batch.
"""
