"""Engines turn prompts and weights into sampled tokens. An engine knows no prompts, rewards or
policies: tokens in, tokens out."""
