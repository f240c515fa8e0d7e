"""What a run keeps of every response."""

from __future__ import annotations

from pydantic import Field

from rollpacker.config.base import Config


class SamplesConfig(Config):
    """What ``samples.parquet`` holds of every response besides its numbers."""

    texts: bool = True
    """Keep the text of prompts and responses."""
    token_ids: bool = False
    """Keep the token ids of responses."""
    max_gb: float = Field(default=0.0, ge=0.0)
    """Largest size of the table on disk in GB; at it the oldest texts and token ids go first, the
    numbers stay. 0 keeps all."""
