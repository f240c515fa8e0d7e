"""A synthetic workload: its parameters, their JSON, and traces drawn from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError

from rollpacker.polytrace.model.lengths import CopulaLengths, LengthModel
from rollpacker.polytrace.model.turns import TurnModel
from rollpacker.polytrace.numerics import normal_cdf
from rollpacker.polytrace.schema import REWARD_BATCHES, SAMPLES, Trace
from rollpacker.polytrace.statistics import QuantileTable

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptModel:
    """Prompt lengths, and the correlation of their normal scores with the responses' shared
    level."""

    tokens: QuantileTable
    correlation: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftModel:
    """A trend of log length per step, constant outside the observed ``steps``. The middle step
    has the model's marginal."""

    slope: float = 0.0
    steps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModel:
    """Seconds of grading.

    Args:
        response_s: of one response. None if only batches were timed.
        batch_s: of a data-parallel rank's batch in one step, per response of it.
        ranks: data-parallel ranks that batches were timed on.
    """

    response_s: QuantileTable | None = None
    batch_s: QuantileTable | None = None
    ranks: int = 1
    kind: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadModel:
    """One task's workload. ``turns`` is None for single-turn tasks, ``rewards`` if unknown."""

    task: str
    lengths: Annotated[CopulaLengths | LengthModel, Field(discriminator="kind")]
    prompt: PromptModel
    prompts: int
    responses: int
    drift: DriftModel = field(default_factory=DriftModel)
    turns: TurnModel | None = None
    rewards: RewardModel | None = None
    source: str = ""
    version: Literal[1] = VERSION


_ADAPTER = TypeAdapter(WorkloadModel)


def to_json(model: WorkloadModel) -> str:
    """Return the model as JSON text."""
    return _ADAPTER.dump_json(model, indent=1).decode() + "\n"


def save_model(model: WorkloadModel, path: Path | str) -> None:
    """Write the model as JSON."""
    Path(path).write_text(to_json(model), encoding="utf-8")


def _shipped() -> dict[str, str]:
    folder = resources.files("rollpacker.polytrace") / "models"
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".json"))
    return {name.removesuffix(".json"): (folder / name).read_text("utf-8") for name in names}


def model_names() -> list[str]:
    """Return the names of the models that ship with the package."""
    return list(_shipped())


def load_model(name_or_path: str | Path) -> WorkloadModel:
    """Load a shipped model by name, or a file of ``save_model``. Raises ``ValueError``."""
    shipped = _shipped()
    text = shipped.get(str(name_or_path))
    if text is None:
        path = Path(name_or_path)
        if not path.is_file():
            names = ", ".join(shipped)
            raise ValueError(
                f"no workload model {str(name_or_path)!r}: give a file or one of {names}"
            )
        text = path.read_text(encoding="utf-8")
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{name_or_path}: {where or 'file'}: {first['msg']}") from None


# --- Drawing a trace

Ints = NDArray[np.int64]


def generate(
    model: WorkloadModel,
    *,
    steps: int,
    prompts: int | None = None,
    responses: int | None = None,
    seed: int = 0,
) -> Trace:
    """Draw a workload of fresh prompts. The same arguments give the same trace. ``prompts`` (per
    step) and ``responses`` (per prompt) default to the model's numbers. Raises ``ValueError`` if
    a number is below 1."""
    chosen = (steps, prompts or model.prompts, responses or model.responses)
    if min(chosen) < 1:
        raise ValueError(f"steps, prompts and responses must be at least 1, got {chosen}")
    _, prompts, responses = chosen
    place = np.arange(steps * prompts * responses)
    visit, step = place // responses, place // (prompts * responses)
    rng = np.random.default_rng(seed)
    traits = model.lengths.traits(rng, steps * prompts)
    prompt_tokens = _prompt_tokens(model, rng, traits[:, 0])[visit]
    lengths = model.lengths.given(rng, traits, responses).ravel()
    response_tokens = _drifted(model, lengths, step)
    columns: dict[str, object] = {
        "task": [model.task] * place.size,
        "step": step,
        "prompt": [f"{model.task}-{number}" for number in visit.tolist()],
        "index": place % responses,
        "domain": [model.task] * place.size,
        "prompt_tokens": prompt_tokens,
        "response_tokens": response_tokens,
        "state": ["kept"] * place.size,
    }
    cap = model.lengths.cap
    if cap is not None:
        columns |= {"cap": [cap] * place.size, "truncated": response_tokens >= cap}
    if model.turns is not None:
        turns, tools = model.turns.sample(rng, prompt_tokens, response_tokens)
        columns |= {"turns": turns, "tools": tools}
    batches = _rewards(model, rng, chosen, columns)
    return Trace(samples=_table(columns, SAMPLES), reward_batches=_table(batches, REWARD_BATCHES))


def _prompt_tokens(
    model: WorkloadModel, rng: np.random.Generator, level: NDArray[np.float64]
) -> Ints:
    own = rng.standard_normal(level.size)
    rho = model.prompt.correlation
    score = rho * level + np.sqrt(1.0 - rho**2) * own
    return np.maximum(np.rint(model.prompt.tokens.at(normal_cdf(score))), 1.0).astype(np.int64)


def _drifted(model: WorkloadModel, lengths: NDArray[np.int32], step: Ints) -> Ints:
    last = model.drift.steps - 1
    since = np.clip(step, 0, last) - last / 2.0
    longest = model.lengths.cap or np.iinfo(np.int32).max
    scaled = np.rint(lengths * np.exp(model.drift.slope * since))
    return np.clip(scaled, 1, longest).astype(np.int64)


def _rewards(
    model: WorkloadModel,
    rng: np.random.Generator,
    shape: tuple[int, int, int],
    columns: dict[str, object],
) -> dict[str, object]:
    rewards = model.rewards
    if rewards is None:
        return {}
    steps, prompts, responses = shape
    rows = steps * prompts * responses
    if rewards.response_s is not None:
        columns["reward_s"] = rewards.response_s.sample(rng, rows)
        columns["reward_kind"] = [rewards.kind] * rows
    if rewards.batch_s is None:
        return {}
    place = (np.arange(rows) // responses) % prompts
    columns["dp_rank"] = place * rewards.ranks // prompts
    ranks = np.tile(np.arange(rewards.ranks), steps)
    own = np.bincount(columns["dp_rank"][: prompts * responses], minlength=rewards.ranks)
    size = own[ranks]
    return {
        "task": [model.task] * ranks.size,
        "step": np.repeat(np.arange(steps), rewards.ranks),
        "dp_rank": ranks,
        "batch_size": size,
        "reward_time_s": size * rewards.batch_s.sample(rng, ranks.size),
    }


def _table(columns: dict[str, object], schema: dict[str, pl.DataType]) -> pl.DataFrame:
    if not columns:
        return pl.DataFrame(schema=schema)
    given = pl.DataFrame(columns)
    return given.select(
        (pl.col(name) if name in columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in schema.items()
    )
