"""Replicas over several devices, as other frameworks' keys come to them."""

from __future__ import annotations

from rollpacker.cli.convert.table import Draft


def spread(draft: Draft, shard: int, engine: int, gpus: int, why: str) -> None:
    """Write ``trainer``, so that a replica holds whole engines.

    Args:
        draft: of the job.
        shard: devices of a replica; 0 for all.
        engine: devices of an engine.
        gpus: of the job; 0 where they are not known.
        why: where ``shard`` comes from.
    """
    if shard and (shard % engine or (gpus and gpus % shard)):
        draft.warnings.append(
            f"trainer.shard: a replica of {shard} devices holds no whole engines of {engine}, or "
            f"{gpus or 'all'} devices do not divide into such replicas; all devices share one"
        )
        shard = 0
    draft.set("trainer.kind", "fsdp", why)
    draft.set("trainer.shard", shard, why)
