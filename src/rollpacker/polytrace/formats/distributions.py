"""``enhanced_task_distribution_parameters.json``: distributions that the suite's authors fitted.

Format of the PolyTrace suite (arXiv 2509.25279). Reading and writing loses nothing: what has no
field is in ``extra``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rollpacker.polytrace.schema import TraceError

Object = dict[str, Any]
Vector = tuple[float, ...]
Matrix = tuple[Vector, ...]


def _object() -> Object:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """``loc + scale * exp(shape * N(0, 1))``, scipy's ``lognorm(shape, loc, scale)``, in tokens."""

    shape: float
    loc: float
    scale: float
    extra: Object = field(default_factory=_object)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """K Gaussians over (input, output) tokens.

    Weights (K,), means (K, 2), covariances (K, 2, 2).
    """

    weights: Vector
    means: Matrix
    covariances: tuple[Matrix, ...]
    extra: Object = field(default_factory=_object)


@dataclass(frozen=True, slots=True, kw_only=True)
class MathTask:
    """Single-turn reasoning: marginals of input and output tokens, and their joint mixture."""

    input: Lognormal
    output: Lognormal
    mixture: Mixture
    extra: Object = field(default_factory=_object)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallModel:
    """Sessions with a given number of calls: one Gaussian over ``features``.

    The file names a number of mixture components, but holds only the mean (F,) and the covariance
    (F, F) of the whole. Features: ``input_i`` and ``output_i`` tokens of call i = 1.., then totals
    and moments of these, so the covariance is singular.
    """

    features: tuple[str, ...]
    mean: Vector
    covariance: Matrix
    extra: Object = field(default_factory=_object)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolTask:
    """Tool calling: sessions by number of calls, and a model for each number."""

    sessions: Mapping[int, int]
    models: Mapping[int, CallModel]
    extra: Object = field(default_factory=_object)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distributions:
    """The whole file; a task that it lacks is None."""

    math: MathTask | None
    tools: ToolTask | None
    extra: Object = field(default_factory=_object)


def read(path: Path) -> Distributions:
    """Read the file. Raises ``TraceError`` that names the file and the key, and ``OSError``."""
    try:
        tree: object = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TraceError(f"{path}: not JSON ({error})") from error
    if not isinstance(tree, dict) or not {"math_task", "tool_calling_task"} & set(
        cast(Object, tree)
    ):
        raise TraceError(f"{path}: expected an object with math_task or tool_calling_task")
    rest = dict(cast(Object, tree))
    math, tools = rest.pop("math_task", None), rest.pop("tool_calling_task", None)
    try:
        return Distributions(
            math=None if math is None else _math(math),
            tools=None if tools is None else _tools(tools),
            extra=rest,
        )
    except KeyError as error:
        raise TraceError(f"{path}: {error.args[0]}: missing") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"{path}: a value has the wrong shape ({error})") from error


def _math(given: Object) -> MathTask:
    rest = dict(given)
    return MathTask(
        input=_lognormal(rest.pop("input_distribution")),
        output=_lognormal(rest.pop("output_distribution")),
        mixture=_mixture(rest.pop("gmm_parameters")),
        extra=rest,
    )


def _lognormal(given: Object) -> Lognormal:
    rest = dict(given)
    if rest.pop("type") != "lognorm":
        raise ValueError(f"type: expected lognorm, got {given['type']}")
    shape, loc, scale = rest.pop("parameters")
    return Lognormal(shape=shape, loc=loc, scale=scale, extra=rest)


def _mixture(given: Object) -> Mixture:
    rest = dict(given)
    weights, means = _vector(rest.pop("weights")), _matrix(rest.pop("means"))
    covariances = tuple(_matrix(each) for each in rest.pop("covariances"))
    if not len(weights) == len(means) == len(covariances):
        raise ValueError("gmm_parameters: weights, means and covariances differ in number")
    return Mixture(weights=weights, means=means, covariances=covariances, extra=rest)


def _tools(given: Object) -> ToolTask:
    rest = dict(given)
    sessions = rest.pop("call_count_distribution")
    models = rest.pop("sequence_models")
    return ToolTask(
        sessions={int(calls): count for calls, count in sessions.items()},
        models={int(calls): _call_model(model) for calls, model in models.items()},
        extra=rest,
    )


def _call_model(given: Object) -> CallModel:
    rest = dict(given)
    model = CallModel(
        features=tuple(rest.pop("feature_names")),
        mean=_vector(rest.pop("mean_vector")),
        covariance=_matrix(rest.pop("covariance_matrix")),
        extra=rest,
    )
    if not len(model.features) == len(model.mean) == len(model.covariance):
        raise ValueError("sequence_models: names, mean and covariance differ in length")
    return model


def _vector(values: list[float]) -> Vector:
    return tuple(values)


def _matrix(rows: list[list[float]]) -> Matrix:
    return tuple(tuple(row) for row in rows)


def write(given: Distributions, path: Path) -> None:
    """The inverse of ``read``. Raises ``OSError``."""
    tree = dict(given.extra)
    if given.math is not None:
        tree["math_task"] = given.math.extra | {
            "input_distribution": _from_lognormal(given.math.input),
            "output_distribution": _from_lognormal(given.math.output),
            "gmm_parameters": given.math.mixture.extra
            | {
                "weights": given.math.mixture.weights,
                "means": given.math.mixture.means,
                "covariances": given.math.mixture.covariances,
            },
        }
    if given.tools is not None:
        tree["tool_calling_task"] = given.tools.extra | {
            "call_count_distribution": given.tools.sessions,
            "sequence_models": {
                calls: _from_call_model(model) for calls, model in given.tools.models.items()
            },
        }
    path.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def _from_lognormal(given: Lognormal) -> Object:
    parameters = (given.shape, given.loc, given.scale)
    return {"type": "lognorm", "parameters": parameters} | given.extra


def _from_call_model(given: CallModel) -> Object:
    return given.extra | {
        "feature_names": given.features,
        "mean_vector": given.mean,
        "covariance_matrix": given.covariance,
    }
