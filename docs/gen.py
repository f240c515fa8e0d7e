"""Writes the generated parts of the pages, and compares them.

    python docs/gen.py [config|simulation|models|adapters|peers|speedups|index ...]
                       [--check] [--measure]

Without names, all of them. ``--check`` writes nothing, and exits with a message where a page is not
what would be written. ``--measure`` first measures models and adapters again
(``tests/train/support``); losses of peers are what ``make test-peers`` measured.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

from rollpacker.config import Config, RunConfig
from rollpacker.config.base import MEANING, sections
from rollpacker.config.on_resume import on_resume
from rollpacker.emulate.config import EmulationConfig
from rollpacker.sim.costs.calibration import Calibration, builtin
from rollpacker.sim.costs.hardware import DEVICES, DeviceSpec
from rollpacker.sim.costs.layers_of_config import FAMILIES
from rollpacker.sim.costs.models import MODELS, ModelShape
from rollpacker.sim.world.machines import DomainConfig, SimulationConfig

ROOT = Path(__file__).parent.parent
SUPPORT = ROOT / "tests" / "train" / "support"
NOTE = re.compile(r"^\*[^*]*`docs/gen\.py`[^*]*\*\n", re.MULTILINE)
"""The paragraph of a page behind which its generated part begins."""


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """The lines of a Markdown table."""
    first, *others = (f"| {' | '.join(map(str, line))} |" for line in (head, *rows))
    return [first.replace("|  |", "| |"), "|" + "---|" * len(head), *others]


def put(page: str, text: str, of: str = "", end: str = "") -> str:
    """A page with this text behind the note that names ``of``, up to ``end`` where it is not the
    rest."""
    note = next((each for each in NOTE.finditer(page) if of in each[0]), None)
    assert note is not None, "the page has no line that says how it is generated"
    rest = page[page.index(end, note.end()) :] if end else ""
    return f"{page[: note.end()]}\n{text.strip()}\n{rest and chr(10)}{rest}"


# Keys of configurations, from the docstrings of the code.

SAME = {"eval.data": "The keys of [`data`](#data), all *free* on resume."}
"""Sections that are told by another one."""


def keys_of_runs() -> str:
    """What becomes of a run that goes on with another value, and every key."""
    classes = [f"- **{kind}**: {meaning}." for kind, meaning in MEANING.items()]
    return "\n".join([*classes, "", *_section("", RunConfig, resumed=True)])


def keys_of_simulations() -> str:
    """Those of simulations and calibrations, known models and GPUs."""
    lines = ["## Simulation file", "", _markup(SimulationConfig.__doc__), ""]
    lines += [*_keys("", SimulationConfig), "`rollout` is [that of runs](config.md#rollout).", ""]
    lines += _section("domains.NAME", DomainConfig)
    lines += _section("", Calibration, "Calibration file")
    lines += [f"Built in: {', '.join(f'`{name}`' for name in builtin())}.", ""]
    shared = [key for key in EmulationConfig.model_fields if key in SimulationConfig.model_fields]
    lines += ["## File of emulated devices", "", _markup(EmulationConfig.__doc__), ""]
    named = ", ".join(f"`{name}`" for name in shared)
    lines += [
        f"{named}: as in a [simulation file](#simulation-file).",
        "",
        *_keys("", EmulationConfig, without=shared),
        "## Known models",
        "",
        *table(("model", "parameters", "cache, bytes a token"), map(_model, MODELS.values())),
        "",
        f"Or the path of a `config.json` of one of these families: "
        f"{', '.join(f'`{each}`' for each in FAMILIES)}. "
        "`active` are the weights that a token meets, embeddings included. What a sequence keeps "
        "besides its tokens are full windows and states of linear attention. Caches are in "
        "bfloat16, on one GPU.",
        "",
        "## Known GPUs",
        "",
    ]
    head = ("GPU", "memory GB", "bandwidth TB/s", "bfloat16 TFLOPS", "all-reduce GB/s")
    return "\n".join([*lines, *table(head, map(_gpu, DEVICES.values()))])


def _gpu(device: DeviceSpec) -> list[str]:
    sizes = (device.memory / 1e9, device.bandwidth / 1e12, device.flops / 1e12, device.bus / 1e9)
    return [f"`{device.name}`", *(f"{size:g}" for size in sizes)]


def _model(model: ModelShape) -> list[str]:
    active = f", {model.active / 1e9:.2f}B active" if model.active < model.parameters else ""
    size = 2 * model.cached(1, 0).sequence
    cache = f"{model.kv_bytes:,}" + (f", and {size:,} a sequence" if size else "")
    return [f"`{model.name}`", f"{model.parameters / 1e9:.2f}B{active}", cache]


def _section(
    path: str, model: type[Config], title: str = "Top level", *, resumed: bool = False
) -> list[str]:
    """A node's own keys, then the sections of the nodes below it; with ``resumed`` also what
    becomes of a run that goes on with another value."""
    lines = _node(f"`{path}`" if path else title, path, model, resumed, {})
    return [*lines, *_below(path, model, resumed)]


def _node(
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
    keys = _keys(path, model, bool(kinds) and not alike, without)
    return [f"## {title}", "", told, "", *keys, *_sections(path, model)]


def _sections(path: str, model: type[Config]) -> list[str]:
    """One line of those that say no more of themselves."""
    told: list[str] = []
    for name, field in model.model_fields.items():
        found, anchor = sections(field.annotation), f"#{path.replace('.', '')}{name}"
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
        if not (name == "kind" and _is_tag(field)) and not sections(field.annotation)
    }


def _keys(
    path: str, model: type[Config], resumed: bool = False, without: Collection[str] = ()
) -> list[str]:
    classes = _classes(path, model) if resumed else {}
    rows = [
        [f"`{name}`", _type(field), _default(field), _markup(field.description)]
        + [classes.get(name, "")] * resumed
        for name, field in model.model_fields.items()
        if field.description and name not in without
    ]
    head = ["key", "type", "default", "meaning", *["on resume"] * resumed]
    return [*table(head, rows), ""] if rows else []


def _is_tag(kind: FieldInfo) -> bool:
    """Whether it tells the members of a union apart: each has one value then."""
    return len(get_args(kind.annotation)) == 1


def _below(path: str, model: type[Config], resumed: bool) -> list[str]:
    lines: list[str] = []
    for name, field in model.model_fields.items():
        here = f"{path}.{name}".lstrip(".")
        models = sections(field.annotation)
        if get_origin(field.annotation) is list:
            here += "[]"
        if here in SAME:
            lines += [f"## `{here}`", "", SAME[here], ""]
        elif len(models) == 1:
            lines += _section(here, models[0], resumed=resumed)
        known: dict[str, tuple[FieldInfo, str]] = {}
        for each in models if len(models) > 1 else ():
            kind = each.model_fields["kind"].default
            lines += _node(f"`{here}`, kind `{kind}`", here, each, resumed, known)
            known = {name: (field, kind) for name, field in each.model_fields.items()} | known
    return lines


def _type(field: FieldInfo) -> str:
    if sections(field.annotation):
        return "list of sections" if get_origin(field.annotation) is list else "section"
    return _type_name(field.annotation) + _limits(field)


def _type_name(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if annotation is type(None):
        return "null"
    if origin is Annotated:
        return _type_name(args[0])
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


# What tests measured.


def models(results: dict[str, Any]) -> str:
    """Of each family, the largest differences."""
    families: dict[str, dict[str, str]] = results["families"]
    worst = max((found["export"] for found in families.values()), key=float)
    head = ("family", "layout", "log-probability", "gradient", "FSDP2", "LoRA", "vLLM")
    rows: list[list[str]] = []
    for name, found in families.items():
        family, comma, variant = name.partition(",")
        cells = [f"`{family}`{comma}{variant}", found["layout"], found["logprob"]]
        cells += [found["gradient"], _larger(f"{found['fsdp']}, {found['fsdp, lora']}")]
        rows.append([*cells, found["adapters"], _larger(found.get("vllm", "not tried"))])
    releases = f"transformers {results['transformers']}, peft {results['peft']}."
    loaded = f"A checkpoint that is loaded again is off by {float(worst):g} nats at most."
    return "\n".join([f"{releases} {loaded}", "", *table(head, rows)])


def _larger(text: str) -> str:
    """Of two numbers; what is none stays."""
    try:
        return max(text.split(", "), key=float)
    except ValueError:
        return text


def measure_models(known: dict[str, Any]) -> dict[str, Any]:
    """All families, worst differences to one digit; what vLLM's tests found is kept."""
    import families  # pyright: ignore[reportMissingImports]
    import family_cases as cases  # pyright: ignore[reportMissingImports]
    import peft
    import torch
    import transformers

    torch.set_num_threads(1)
    names = list(families.CONFIGURATIONS)
    with tempfile.TemporaryDirectory() as folder:
        spread = cases.over_processes(names, Path(folder))
    found: dict[str, Any] = {}
    for name in names:
        own = cases.forward(name)
        layout, ways = own.pop("layout"), list(own.values())
        found[name] = {
            "layout": layout,
            "logprob": f"{max(way[0] for way in ways):.0e}",
            "gradient": f"{max(way[1] for way in ways):.0e}",
            "adapters": f"{cases.adapters(name):.0e}",
            "export": f"{cases.export(name):.0e}",
        }
        for kind in ("fsdp", "fsdp, lora"):
            value = spread[f"{name}/{kind}"]
            found[name][kind] = value if isinstance(value, str) else f"{value:.0e}"
        if vllm := known.get("families", {}).get(name, {}).get("vllm"):
            found[name]["vllm"] = vllm
    releases = {"transformers": transformers.__version__, "peft": peft.__version__}
    return {**releases, "families": found}


def adapters(results: dict[str, Any]) -> str:
    """Of each kind of peft and each option of LoRA, the largest difference, or why not."""
    parts = [f"### Kinds of peft {results['peft']}\n", *_adapters("kind", results["kinds"])]
    last = _adapters("option", results["options"])
    return "\n".join([*parts, "\n### Options of LoRA\n", *last])


def _adapters(what: str, rows: dict[str, Any]) -> list[str]:
    taken: list[list[str]] = []
    reasons: dict[str, list[str]] = {}
    for name, found in sorted(rows.items()):
        if found["refused"] is None:
            taken.append([name, found["worst"], found["changed"]])
            continue
        # Its reason, without the name of a kind and the advice.
        why = re.sub("^adapter(?: of kind [A-Z_]+)?: ", "", found["refused"])
        why = why.partition(": take another one")[0].removesuffix(": leave it out")
        reasons.setdefault(why, []).append(name)
    refusals = [f"- {'; '.join(names)}: {why}" for why, names in reasons.items()]
    return [*table((what, "difference", "changed"), taken), "", "Refused:", "", *refusals]


def measure_adapters(_: dict[str, Any]) -> dict[str, Any]:
    """Every kind and option, with the built-in engine."""
    import adapter_cases as cases  # pyright: ignore[reportMissingImports]
    import peft

    def row(found: Any) -> dict[str, Any]:
        worst, changed = f"{found.worst:.1e}", f"{found.changed:.2g}"
        return {"refused": found.refused, "worst": worst, "changed": changed}

    options = {name: cases.option_of(name) for name in cases.OPTIONS}
    return {
        "peft": peft.__version__,
        "kinds": {kind.value: row(cases.measure_kind(kind, cases.mini)) for kind in peft.PeftType},
        "options": {
            name: row(cases.measure(config, cases.mini, tied=tied))
            for name, (tied, config) in options.items()
        },
    }


PEERS = {"trl": "TRL", "verl": "verl"}


def peers(results: dict[str, Any]) -> str:
    """A table for each peer."""
    parts: list[str] = []
    for peer, found in results.items():
        parts += [f"### {PEERS[peer]} {found['version']}", ""]
        rows = [
            [f"`{name}`", f"`{row['call']}`", row["gradient"], row["advantages"]]
            for name, row in found["cases"].items()
        ]
        parts += table(("ours", "theirs", "gradient", "advantages"), rows)
        worst = max(float(row["gradient"]) for row in found["cases"].values())
        parts += ["", f"Largest difference of a gradient: {worst:.0e}.", ""]
    return "\n".join(parts)


# Speed-ups, from docs/speedups.yaml.

_ABOUT = ("benchmarks", "concepts", "emulation", "guide", "reproduction", "scale", "simulation")
PAGES = ("README.md", *(f"docs/{name}.md" for name in _ABOUT))
"""Pages whose speed-ups are rows of docs/speedups.yaml."""
SETTINGS = {"7B/8k": 2.03, "14B/16k": 2.22, "32B/32k": 2.56}
"""The speed-ups that the paper publishes, over its own baseline."""
GPUS = {"7B/8k": 16, "14B/16k": 32, "32B/32k": 64}
LATE = "off, graded after the rollout"
PAPER = "the paper's full system"
MODES = {
    "exact": ("`exact` (default)", "idle devices grade and compute gradients"),
    "prompts, eta 1.125": ("`prompts`", "slow prompts move to a later round"),
    "race": ("`race`", "slow prompts and responses move to a later round"),
    "auto, bias limit 0.95": ("`auto`", "the best of these each step, within a limit on bias"),
    "partial, eta 1.25": ("`partial`", "they continue in the next step, off-policy (to compare)"),
}
"""Arms of the README's table: the mode, and what happens to the longest responses."""
MARK, END = "<!-- speed-ups -->\n", "<!-- end of speed-ups -->\n"
_OTHER_UNIT = re.compile(r"times as fast|faster by|of the wall time")
Rows = Mapping[str, Mapping[str, Mapping[str, float]]]


def told_speedups() -> dict[str, Any]:
    """``simulated`` are written by ``experiments/improvements/run.py``, over plain rounds that
    grade while they decode. A row of ``measured`` has the seconds of baseline and mode, or the
    factor itself, and the pages that say it."""
    return yaml.safe_load((ROOT / "docs" / "speedups.yaml").read_text(encoding="utf-8"))


def factor(row: Mapping[str, Any]) -> str:
    """Of a measured row."""
    told = row["seconds"][0] / row["seconds"][1] if "seconds" in row else row["factor"]
    return f"{told:.2f}x"


def speedups(
    settings: Sequence[str],
    rows: Rows,
    arms: Mapping[str, Sequence[str]],
    heads: Sequence[str] = ("arm",),
) -> list[str]:
    """A row an arm, a column a setting: factor, and kept over true length or the stale share."""

    def cell(row: Mapping[str, float] | None) -> str:
        if row is None:
            return "-"
        more = f"{row['stale']:.0%} stale" if "stale" in row else f"{row['kept']:.2f}"
        return f"{row['factor']:.2f}x / {more}"

    names = [f"{name}, {GPUS[name]} GPUs" if name in GPUS else name for name in settings]
    lines = (
        [*words, *(cell(rows[name].get(arm)) for name in settings)] for arm, words in arms.items()
    )
    return table([*heads, *names], lines)


def blocks(rows: Rows) -> dict[str, str]:
    """What stands between the marks of a page."""

    def over_late(arm: str) -> list[float]:
        return [rows[name][arm]["factor"] / rows[name][LATE]["factor"] for name in SETTINGS]

    late, full, published = (
        ", ".join(f"{each:.2f}x" for each in some)
        for some in (over_late("off"), over_late(PAPER), SETTINGS.values())
    )
    footnote = (
        "The second number is the mean length kept, over the true mean length (1 is unbiased), or\n"
        "the share of stale tokens. The paper's baseline grades after the rollout. Over it, `off`\n"
        f"gains {late} here and the paper's full system {full}.\n"
        f"The paper reports {published}."
    )
    every = {arm: (arm,) for arm in next(iter(rows.values()))}
    heads = ("mode", "what happens to the longest responses")
    return {
        "README.md": "\n".join([*speedups([*SETTINGS], rows, MODES, heads), "", footnote]),
        "experiments/improvements/README.md": "\n".join(speedups([*rows], rows, every)),
    }


def put_block(page: str, block: str) -> str:
    """A page with this block between its marks."""
    head, _, rest = page.partition(MARK)
    return f"{head}{MARK}\n{block}\n\n{END}{rest.partition(END)[2]}"


def wrong(page: str, text: str, told: Mapping[str, Any]) -> list[str]:
    """What a page lacks of its rows, and says beside them; blocks of output may say anything, and a
    row's number may stand in one."""
    mine = [row for row in told["measured"] if page in row["pages"]]
    lacks = [f"{factor(row)} ({row['what']})" for row in mine if factor(row) not in text]
    prose = re.sub(r"```.*?```|<!-- speed-ups -->.*?<!-- end", "", text, flags=re.DOTALL)
    known = {factor(row) for row in mine}
    known |= {f"{arms[arm]['factor']:.2f}x" for arms in told["simulated"].values() for arm in arms}
    more = [each for each in re.findall(r"\b\d+\.\d+x\b", prose) if each not in known]
    return [*lacks, *more, *_OTHER_UNIT.findall(prose)]


# The first page: the README up to its modes.

UNTIL, BEHIND = "## Pick a mode", "<!-- end of the README's part -->\n"
TREE = "https://github.com/rollpacker/rollpacker/tree/main/"


def first_page(readme: str, page: str) -> str:
    """The page with the README's first half, whose links lead into the site or to the sources."""

    def link(found: re.Match[str]) -> str:
        target = found[1]
        if re.match(r"https?:|#", target):
            return f"]({target})"
        return f"]({target.removeprefix('docs/')})" if "docs/" in target else f"]({TREE}{target})"

    half = re.sub(r"\]\(([^)]*)\)", link, readme[: readme.index(UNTIL)])
    for anchor, target in (("#limitations", "ran.md"), ("#measured", "benchmarks.md")):
        half = half.replace(f"]({anchor})", f"]({target})")
    return f"{half.strip()}\n\n{BEHIND}{page.partition(BEHIND)[2]}"


# Pages.

Results = Callable[[dict[str, Any]], Any]
MEASURED: dict[str, tuple[Path, Results, Results | None, str]] = {
    "models": (SUPPORT / "family_results.json", models, measure_models, "## Adapters\n"),
    "adapters": (
        SUPPORT / "adapter_results.json",
        adapters,
        measure_adapters,
        "## Losses of TRL and verl\n",
    ),
    "peers": (
        ROOT / "tests" / "peers" / "results.json",
        peers,
        None,
        "### Differences on purpose\n",
    ),
}
"""Parts of the page of compatibility: the file that has the measurements, what is made of it, how
they are measured, and the text of the page behind the part."""
KEYS = {"config": keys_of_runs, "simulation": keys_of_simulations}
NAMES = (*KEYS, *MEASURED, "speedups", "index")


def written(name: str) -> dict[Path, str]:
    """Pages as they are to be."""
    if name == "speedups":
        found = {ROOT / page: block for page, block in blocks(told_speedups()["simulated"]).items()}
        return {path: put_block(path.read_text(encoding="utf-8"), b) for path, b in found.items()}
    path = ROOT / "docs" / f"{'compatibility' if name in MEASURED else name}.md"
    page = path.read_text(encoding="utf-8")
    if name == "index":
        return {path: first_page((ROOT / "README.md").read_text(encoding="utf-8"), page)}
    if name in KEYS:
        return {path: put(page, KEYS[name]())}
    results, render, _, end = MEASURED[name]
    return {path: put(page, render(json.loads(results.read_text())), name, end)}


def measure(name: str) -> None:
    """Measure again what a page shows, where that is done here."""
    if name not in MEASURED or (again := MEASURED[name][2]) is None:
        return
    sys.path[:0] = [str(SUPPORT.parents[1]), str(SUPPORT.parent), str(SUPPORT)]
    path = MEASURED[name][0]
    found = again(json.loads(path.read_text()))
    sort = name == "adapters"
    path.write_text(json.dumps(found, indent=1 + sort, sort_keys=sort) + "\n")


def main() -> None:
    """Write or compare the pages that are named."""
    flags = {word for word in sys.argv[1:] if word.startswith("--")}
    names = [word for word in sys.argv[1:] if word not in flags] or NAMES
    if unknown := {*names} - {*NAMES} | flags - {"--check", "--measure"}:
        sys.exit(f"no {min(unknown)}\n{__doc__}")
    for name in names:
        if "--measure" in flags:
            measure(name)
        for path, text in written(name).items():
            if "--check" not in flags:
                path.write_text(text, encoding="utf-8")
            elif path.read_text(encoding="utf-8") != text:
                sys.exit(f"{path.relative_to(ROOT)} is out of date: python docs/gen.py {name}")
    for page in PAGES if "speedups" in names else ():
        if found := wrong(page, (ROOT / page).read_text(encoding="utf-8"), told_speedups()):
            sys.exit(f"{page}: not as docs/speedups.yaml has it: {', '.join(found)}")


if __name__ == "__main__":
    main()
