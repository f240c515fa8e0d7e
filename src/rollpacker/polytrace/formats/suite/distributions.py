"""``enhanced_task_distribution_parameters.json``: distributions that the suite's authors fitted.

Format of the PolyTrace suite (arXiv 2509.25279). Reading and writing loses nothing: keys that have
no field are kept as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rollpacker.polytrace.schema import TraceError

Vector = tuple[float, ...]
Matrix = tuple[Vector, ...]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")


class Lognormal(_Part):
    """``loc + scale * exp(shape * N(0, 1))``, scipy's ``lognorm(shape, loc, scale)``, in tokens.

    ``parameters`` are the shape, the location and the scale.
    """

    type: str
    parameters: tuple[float, float, float]

    @field_validator("type")
    @classmethod
    def _known(cls, type: str) -> str:
        if type != "lognorm":
            raise ValueError(f"type: expected lognorm, got {type}")
        return type


class Mixture(_Part):
    """K Gaussians over (input, output) tokens.

    Weights (K,), means (K, 2), covariances (K, 2, 2).
    """

    weights: Vector
    means: Matrix
    covariances: tuple[Matrix, ...]

    @model_validator(mode="after")
    def _whole(self) -> Mixture:
        if not len(self.weights) == len(self.means) == len(self.covariances):
            raise ValueError("gmm_parameters: weights, means and covariances differ in number")
        return self


class MathTask(_Part):
    """Single-turn reasoning: marginals of input and output tokens, and their joint mixture."""

    input: Lognormal = Field(alias="input_distribution")
    output: Lognormal = Field(alias="output_distribution")
    mixture: Mixture = Field(alias="gmm_parameters")


class CallModel(_Part):
    """Sessions with a given number of calls: one Gaussian over ``features``.

    The file names a number of mixture components, but holds only the mean (F,) and the covariance
    (F, F) of the whole. Features: ``input_i`` and ``output_i`` tokens of call i = 1.., then totals
    and moments of these, so the covariance is singular.
    """

    features: tuple[str, ...] = Field(alias="feature_names")
    mean: Vector = Field(alias="mean_vector")
    covariance: Matrix = Field(alias="covariance_matrix")

    @model_validator(mode="after")
    def _whole(self) -> CallModel:
        if not len(self.features) == len(self.mean) == len(self.covariance):
            raise ValueError("sequence_models: names, mean and covariance differ in length")
        return self


class ToolTask(_Part):
    """Tool calling: sessions by number of calls, and a model for each number."""

    sessions: dict[int, int] = Field(alias="call_count_distribution")
    models: dict[int, CallModel] = Field(alias="sequence_models")


class Distributions(_Part):
    """The whole file; a task that it lacks is None."""

    math: MathTask | None = Field(None, alias="math_task")
    tools: ToolTask | None = Field(None, alias="tool_calling_task")

    @model_validator(mode="before")
    @classmethod
    def _either(cls, tree: object) -> object:
        if isinstance(tree, dict) and ("math_task" in tree or "tool_calling_task" in tree):
            return cast(object, tree)
        raise ValueError("expected an object with math_task or tool_calling_task")


def read(path: Path) -> Distributions:
    """Read the file. Raises ``TraceError`` that names the file and the key, and ``OSError``."""
    try:
        return Distributions.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where, what = ".".join(map(str, first["loc"])), first["msg"]
        if first["type"] == "json_invalid":
            raise TraceError(f"{path}: not JSON ({what})") from error
        if not where:
            raise TraceError(f"{path}: {what.removeprefix('Value error, ')}") from error
        if first["type"] == "missing":
            raise TraceError(f"{path}: {where}: missing") from error
        raise TraceError(f"{path}: a value has the wrong shape ({where}: {what})") from error


def write(given: Distributions, path: Path) -> None:
    """The inverse of ``read``. Raises ``OSError``."""
    text = given.model_dump_json(by_alias=True, exclude_unset=True, indent=2)
    path.write_text(text + "\n", encoding="utf-8")
