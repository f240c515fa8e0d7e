"""The model: loading, the forward pass, and the facts that samplers need."""
