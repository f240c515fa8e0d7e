"""Writes the references of configuration keys from the docstrings of the code.

``docs/config.md`` is of runs, ``docs/simulation.md`` of simulations and calibrations.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

from rollpacker.config import Config, RunConfig
from rollpacker.config.reading.on_resume import MEANING, on_resume
from rollpacker.emulate.config import EmulationConfig
from rollpacker.sim.costs.calibration import Calibration, builtin
from rollpacker.sim.costs.hardware import DEVICES
from rollpacker.sim.costs.layers_of_config import FAMILIES
from rollpacker.sim.costs.models import MODELS, ModelShape
from rollpacker.sim.world.config import DomainConfig, SimulationConfig

FOLDER = Path(__file__).parent
HEAD = """# Configuration

A run is described by one YAML file ([guide](guide.md)). Single keys are overridden on the command
line:

```bash
rollpacker train run.yaml rollout.tail_batching.mode=race train.learning_rate=3e-4
```

Unknown keys are errors that name the key that is meant, also for names of other frameworks. The
`kind` of a part (an engine, an algorithm) chooses which keys are valid. The resolved configuration
is `config.yaml` in the run's folder.

*On resume* says what becomes of a run that is continued (`--resume auto`) with another value of the
key. Files and folders are compared by what they hold, not by how their paths are spelled. A line
names the key of a Python file that was edited in its place.

RESUME

*This page is generated from the code by `docs/gen_config.py`.*
"""

SAME = {"eval.data": "The keys of [`data`](#data), all *free* on resume."}
"""Sections that are told by another one."""

SIMULATION_HEAD = """# Keys of simulations

What [`rollpacker simulate`](simulator.md) reads: a simulation file (`examples/simulate`), and the
calibration file (costs) that it names. That of [`devices.emulate`](emulation.md) is at the end.

```text
calibration: paper-14b-16k      # built in, or a file
workload: paper-16k             # a shipped model, or a trace
rollout: {tail_batching: {mode: race}}
```

Keys are set on the command line too:

```bash
rollpacker simulate job.yaml model=Qwen2.5-32B device=H200 gpus=64
rollpacker estimate --from LOGS --model Qwen3-8B --device B200 --gpus 16
```

Another model or GPU brings its own sizes and datasheet. What was *fitted* to the calibration's
experiment (`kappa`, `train_mfu`, seconds of updates and of new weights) is taken over, and the
output says so. A calibration of your own has no such guesses: `rollpacker calibrate --from RUN`,
or a copy of a built-in one (`src/rollpacker/sim/calibration`) with your measurements.

*This page is generated from the code by `docs/gen_config.py`.*
"""


def render() -> str:
    """The reference of runs."""
    classes = "\n".join(f"- **{kind}**: {meaning}." for kind, meaning in MEANING.items())
    return "\n".join([HEAD.replace("RESUME", classes), *_section("", RunConfig, resumed=True)])


def render_simulation() -> str:
    """The reference of simulations, calibrations, models and GPUs."""
    known = f"Built in: {', '.join(f'`{name}`' for name in builtin())}.\n"
    lines = [SIMULATION_HEAD, "## Simulation file", "", _markup(SimulationConfig.__doc__), ""]
    lines += [*_table("", SimulationConfig), "`rollout` is [that of runs](config.md#rollout).", ""]
    lines += _section("domains.NAME", DomainConfig)
    lines += [*_section("", Calibration, "Calibration file"), known]
    lines += [*_emulation(), "## Known models", ""]
    lines += ["| model | parameters | cache, bytes a token |", "|---|---|---|"]
    lines += [
        f"| `{m.name}` | {m.parameters / 1e9:.2f}B{_active(m)} | {m.kv_bytes:,}{_sequence(m)} |"
        for m in MODELS.values()
    ]
    families = ", ".join(f"`{each}`" for each in FAMILIES)
    lines += [
        "",
        f"Or the path of a `config.json` of one of these families: {families}. "
        "`active` are the weights that a token meets, embeddings included. What a sequence keeps "
        "besides its tokens are full windows and states of linear attention. Caches are in "
        "bfloat16, on one GPU.",
        "",
        "## Known GPUs",
        "",
        "| GPU | memory GB | bandwidth TB/s | bfloat16 TFLOPS | all-reduce GB/s |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| `{d.name}` | {d.memory / 1e9:g} | {d.bandwidth / 1e12:g} | {d.flops / 1e12:g} "
        f"| {d.bus / 1e9:g} |"
        for d in DEVICES.values()
    ]
    return "\n".join([*lines, ""])


def _active(model: ModelShape) -> str:
    return f", {model.active / 1e9:.2f}B active" if model.active < model.parameters else ""


def _sequence(model: ModelShape) -> str:
    size = 2 * model.cached(1, 0).sequence
    return f", and {size:,} a sequence" if size else ""


def _emulation() -> list[str]:
    """The file's own keys; the others are a simulation's."""
    shared = [key for key in EmulationConfig.model_fields if key in SimulationConfig.model_fields]
    named = ", ".join(f"`{name}`" for name in shared)
    lines = ["## File of emulated devices", "", _markup(EmulationConfig.__doc__), ""]
    lines += [f"{named}: as in a [simulation file](#simulation-file).", ""]
    return [*lines, *_table("", EmulationConfig, without=shared)]


def _section(
    path: str, model: type[Config], title: str = "Top level", *, resumed: bool = False
) -> list[str]:
    """A node's own keys, then the sections of the nodes below it; with ``resumed`` also what
    becomes of a run that goes on with another value."""
    lines = _keys(f"`{path}`" if path else title, path, model, resumed, {})
    return [*lines, *_below(path, model, resumed)]


def _keys(
    title: str,
    path: str,
    model: type[Config],
    resumed: bool,
    known: Mapping[str, tuple[FieldInfo, str]],
) -> list[str]:
    """One section; what is so of all its keys on resume is said once, and so are those that a kind
    further up has too (``known``: each key's first, and whose it is)."""
    kinds = [*_classes(path, model).values()] if resumed else []
    alike = len({*kinds}) == 1
    told = _markup(model.__doc__) + (f" On resume: *{kinds[0]}*." if alike else "")
    same: dict[str, list[str]] = {}
    for name, (first, kind) in known.items():
        if first.description and repr(model.model_fields.get(name)) == repr(first):
            same.setdefault(kind, []).append(name)
    for kind, names in same.items():
        told += f" As of `{kind}`: {', '.join(f'`{name}`' for name in names)}."
    without = [name for names in same.values() for name in names]
    table = _table(path, model, bool(kinds) and not alike, without)
    return [f"## {title}", "", told, "", *table, *_sections(path, model)]


def _sections(path: str, model: type[Config]) -> list[str]:
    """One line of those that say no more of themselves."""
    told: list[str] = []
    for name, field in model.model_fields.items():
        found, anchor = _models(field.annotation), f"#{path.replace('.', '')}{name}"
        if field.description or not found:
            continue
        kinds = [each.model_fields["kind"].default for each in found if len(found) > 1]
        links = ", ".join(f"[`{kind}`]({anchor}-kind-{kind})" for kind in kinds)
        links = links.replace(")", ") (default)", 1)
        link = f"`{name}` of `kind` {links}" if kinds else f"[`{name}`]({anchor})"
        told.append(link + " (required)" * field.is_required())
    return [f"Sections: {'; '.join(told)}.", ""] if told else []


def _classes(path: str, model: type[Config]) -> dict[str, str]:
    """What becomes of a run that goes on with another value, by the node's leaves."""
    return {
        name: on_resume(f"{path}.{name}".lstrip("."))
        for name, field in model.model_fields.items()
        if not (name == "kind" and _is_tag(field)) and not _models(field.annotation)
    }


def _table(
    path: str, model: type[Config], resumed: bool = False, without: Collection[str] = ()
) -> list[str]:
    classes = _classes(path, model) if resumed else {}
    rows = [
        f"| `{name}` | {_type(field)} | {_default(field)} | {_markup(field.description)} |"
        + (f" {classes.get(name, '')} |" if resumed else "")
        for name, field in model.model_fields.items()
        if field.description and name not in without
    ]
    columns = ["key", "type", "default", "meaning", *(["on resume"] if resumed else [])]
    head = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return [*head, *rows, ""] if rows else []


def _is_tag(kind: FieldInfo) -> bool:
    """Whether it tells the members of a union apart: each has one value then."""
    return len(get_args(kind.annotation)) == 1


def _below(path: str, model: type[Config], resumed: bool) -> list[str]:
    lines: list[str] = []
    for name, field in model.model_fields.items():
        here = f"{path}.{name}".lstrip(".")
        models = _models(field.annotation)
        if get_origin(field.annotation) is list:
            here += "[]"
        if here in SAME:
            lines += [f"## `{here}`", "", SAME[here], ""]
        elif len(models) == 1:
            lines += _section(here, models[0], resumed=resumed)
        known: dict[str, tuple[FieldInfo, str]] = {}
        for each in models if len(models) > 1 else ():
            kind = each.model_fields["kind"].default
            lines += _keys(f"`{here}`, kind `{kind}`", here, each, resumed, known)
            known = {name: (field, kind) for name, field in each.model_fields.items()} | known
    return lines


def _models(annotation: Any) -> list[type[Config]]:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    args = cast(tuple[Any, ...], get_args(annotation))
    return [model for arg in args for model in _models(arg)]


def _type(field: FieldInfo) -> str:
    if _models(field.annotation):
        return "list of sections" if get_origin(field.annotation) is list else "section"
    return _type_name(field.annotation) + _limits(field)


def _type_name(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if annotation is type(None):
        return "null"
    if origin is list:
        return f"list of {_type_name(args[0])}"
    if origin is dict or annotation is Any:
        return "mapping" if origin is dict else "any"
    if args:
        return " or ".join(_type_name(arg) for arg in args)
    name = str(annotation.__name__)
    return {"str": "text"}.get(name, name)


def _limits(field: FieldInfo) -> str:
    parts: list[str] = []
    for limit in field.metadata:
        match limit:
            case Ge(ge=value):
                parts.append(f"≥ {value}")
            case Gt(gt=value):
                parts.append(f"> {value}")
            case Le(le=value):
                parts.append(f"≤ {value}")
            case Lt(lt=value):
                parts.append(f"< {value}")
            case MinLen(min_length=value):
                parts.append(f"at least {value}")
            case _:
                pass
    return f" ({', '.join(parts)})" if parts else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, dict) and value:
        return ""
    if isinstance(value, Config):
        tag = type(value).model_fields.get("kind")
        return f"kind `{tag.default}`" if tag is not None and _is_tag(tag) else ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`" if value not in (None, "") else "none"


def _markup(docstring: str | None) -> str:
    return " ".join((docstring or "").split()).replace("``", "`").replace("|", "\\|")


def main() -> None:
    """Write the pages; with ``--check`` only compare, and exit 1 when one is out of date."""
    for name, text in (("config.md", render()), ("simulation.md", render_simulation())):
        page = FOLDER / name
        if "--check" not in sys.argv[1:]:
            page.write_text(text, encoding="utf-8")
        elif not page.exists() or page.read_text(encoding="utf-8") != text:
            sys.exit(f"{name} is out of date: run make docs")


if __name__ == "__main__":
    main()
