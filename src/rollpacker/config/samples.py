"""What a run keeps of every response."""

from __future__ import annotations

from pydantic import Field

from rollpacker.config.base import Config, Free


class SamplesConfig(Config):
    """What ``samples/step-*.parquet`` hold besides numbers: [samples](samples.md)."""

    texts: Free[bool] = True
    """Keep the text of prompts and responses."""
    token_ids: Free[bool] = False
    """Keep the token ids of responses."""
    max_gb: Free[float] = Field(default=0.0, ge=0.0)
    """Largest table on disk in GB, beyond which the rows of the oldest steps go; 0 keeps all."""
