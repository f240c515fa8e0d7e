"""The parameters of a synthetic workload, and its JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from rollpacker.polytrace.model.copula import CopulaLengths
from rollpacker.polytrace.model.length_model import LengthModel
from rollpacker.polytrace.model.turn_model import TurnModel
from rollpacker.polytrace.statistics.quantiles import QuantileTable

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptModel:
    """Prompt lengths, joint with response lengths.

    Args:
        correlation: of the prompt's normal score with the shared level of its responses.
    """

    tokens: QuantileTable
    correlation: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftModel:
    """A trend of log length, held flat outside the steps it was seen on.

    Args:
        slope: change of log length a step.
        steps: steps it was seen on; the middle one has the model's marginal.
    """

    slope: float = 0.0
    steps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModel:
    """Seconds of grading.

    Args:
        response_s: of one response; None where only batches were timed.
        batch_s: of a data-parallel rank's batch in one step, per response of it.
        ranks: data-parallel ranks that batches were timed on.
        kind: kind of reward.
    """

    response_s: QuantileTable | None = None
    batch_s: QuantileTable | None = None
    ranks: int = 1
    kind: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadModel:
    """One task's workload.

    Args:
        drift: trend over steps.
        turns: turns and tool calls; None for single-turn tasks.
        rewards: seconds of grading; None where unknown.
        source: what it was fitted to, in words.
    """

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
    """The model as JSON text."""
    return _ADAPTER.dump_json(model, indent=1).decode() + "\n"


def save_model(model: WorkloadModel, path: Path | str) -> None:
    """Write the model as JSON."""
    Path(path).write_text(to_json(model), encoding="utf-8")


def _shipped() -> dict[str, str]:
    folder = resources.files("rollpacker.polytrace") / "models"
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".json"))
    return {name.removesuffix(".json"): (folder / name).read_text("utf-8") for name in names}


def model_names() -> list[str]:
    """Names of the models that ship with the package."""
    return list(_shipped())


def load_model(name_or_path: str | Path) -> WorkloadModel:
    """A shipped model by name, or one that ``save_model`` wrote. Raises ``ValueError``."""
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
