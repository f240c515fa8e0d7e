"""Joint rules of both frameworks: what several of their keys together say of ours."""

from __future__ import annotations

from collections.abc import Mapping

from rollpacker.cli.convert.table import Draft
from rollpacker.config import TrainConfig
from rollpacker.config.base import kind_of, sections

KIND, UPDATES = "train.algorithm.kind", "train.updates_per_step"
CORRECTION = "train.sampler_correction"
_FIELDS: Mapping[str, set[str]] = {
    kind_of(each): {*each.model_fields}
    for each in sections(TrainConfig.model_fields["algorithm"].annotation)
}


def fit(draft: Draft) -> None:
    """Take out the options that the algorithm has not got, and say what is missed by it."""
    kind = draft.settings[KIND].value
    for path, setting in [*draft.settings.items()]:
        start, _, name = path.rpartition(".")
        if start != "train.algorithm" or name in _FIELDS[kind]:
            continue
        draft.drop(path, f"{kind} has no {name}")
        low = draft.settings["train.algorithm.epsilon"].value
        if name != "epsilon_high" or setting.value != low:
            draft.refuse(f"{kind} has no {name}", *setting.keys)


def differ(draft: Draft, hint: str, *keys: str, path: str = KIND) -> None:
    """Something that is done otherwise here, if only by the framework's default."""
    draft.refuse(hint, *keys)
    if not any(key in draft.given for key in keys):
        draft.warnings.append(f"{path}: {hint}; {draft.origin(keys[0])}")


def correct(
    draft: Draft, kind: str, level: str, low: float, high: float, *keys: str, note: str = ""
) -> None:
    """Importance weights between sampler and trainer: what is asked for by ``keys``, the one of its
    kind first, the one of its upper bound last; by hand where that cannot be."""
    if any(key in draft.refused for key in keys):
        return
    for name, whole in (("top_p", 1.0), ("top_k", 0)):
        setting = draft.settings.get(f"rollout.{name}")
        if setting is not None and setting.value != whole:
            hint = f"weights need the whole softmax, rollout.{name} cuts it"
            differ(draft, hint, *keys, path=f"{CORRECTION}.kind")
            return
    if not 0.0 <= low <= 1.0 <= high:
        draft.refuse("its bounds have 1 between them: ratios that agree are 1", *keys)
        return
    draft.set(f"{CORRECTION}.kind", kind, *keys, note=note)
    draft.set(f"{CORRECTION}.level", level, *keys[:-1])
    if kind == "mask":
        draft.set(f"{CORRECTION}.low", low, *keys[1:])
    draft.set(f"{CORRECTION}.high", high, keys[-1])


def machines(draft: Draft, key: str) -> int:
    """How many, by ``key``; several are of a Ray cluster."""
    count = draft.number(key, 1)
    if count > 1:
        draft.set("devices.nodes", count, key)
        note = "the Ray cluster of which the machine that starts the run is a part"
        draft.set("cluster.address", "auto", key, note=note)
    return count


def warm_up(draft: Draft, count: int | None, key: str, note: str) -> None:
    """A number of updates; None where the file does not say of how many it is a share."""
    if count is None:
        hint = "how many steps there will be is not known: --steps N, or train.warmup_steps"
        draft.refuse(hint, key)
        return
    draft.set("train.warmup_steps", count, key, note=note)
    draft.set("train.warmup_from_zero", True, note=f"as in {draft.table.framework}")
