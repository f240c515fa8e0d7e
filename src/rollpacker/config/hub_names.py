"""What the ``config.json`` of models call a thing that every family names its own way."""

from __future__ import annotations

ROUTED = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "num_experts_per_token")
"""How many experts a token goes to."""
