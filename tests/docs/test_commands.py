"""The commands on the documentation's pages are those that there are; nothing of them is run."""

import ast
import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
from pages import ROOT, Command, calls, commands, pages

from rollpacker import config
from rollpacker.cli import app
from rollpacker.core.codec import read_record
from rollpacker.rollmux.model.settings import Settings
from rollpacker.sim.world.machines import SimulationConfig

SMALLEST = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"function": "math"}]}
ASIDE = ("experiments/LOG.md", "docs/extending.md")
"""Commands of earlier versions; of what the page adds, which ``test_extending.py`` runs."""
INCOMPLETE = ("MissingParameter", "BadOptionUsage", "NoArgsIsHelpError")
"""What is wrong with a command that is only named."""
YOURS = ("loop.py", "other.py", "solution.py")
"""Programs that stand for the reader's."""


@cache
def cli() -> Any:
    return typer.main.get_command(app)


@cache
def targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z0-9-]*):", makefile, re.M))


def parsed(words: Sequence[str]) -> tuple[str, Any]:
    """The name of a command and its context, which has the values; raises what Typer raises."""
    command, context, name, rest = cli(), None, words[0], words[1:]
    while rest and hasattr(command, "resolve_command"):
        context = command.make_context(name, [*rest], parent=context)
        if not (rest := [*context._protected_args, *context.args]):
            break
        name, command, rest = command.resolve_command(context, rest)
    if hasattr(command, "resolve_command"):  # a group alone, which shows its help
        return name, context
    numbered = ["1" if word == "N" else word for word in rest]
    return name, command.make_context(name, numbered, parent=context)


def wrong_with(command: Command) -> str:
    """What is wrong with it in a line; empty if nothing is."""
    program, *words = command.words
    if not words:
        return ""
    if program == "rollpacker":
        return wrong_call(command)
    if program == "make":
        asked = [word for word in words if word[0] != "-" and "=" not in word]
        return f"no target {unknown}" if (unknown := {*asked} - targets()) else ""
    if program in ("python", "python3") and words:
        if words[0] == "-m" and words[1:2] == ["rollpacker"]:
            return wrong_call(Command(command.where, ("rollpacker", *words[2:]), command.whole))
        if words[0] == "-m" and words[1:] and words[1].startswith("benchmarks."):
            return wrong_benchmark(words[1], words[2:])
        if words[0].endswith(".py") and Path(words[0]).name not in YOURS:
            return "" if (ROOT / words[0]).is_file() else f"no file {words[0]}"
    return ""


def wrong_call(command: Command) -> str:
    """Of rollpacker: what Typer says, or the configuration."""
    try:
        name, context = parsed(command.words)
    except Exception as error:
        kind = type(error).__name__
        if kind == "Exit" or (not command.whole and kind in INCOMPLETE):  # --help, --version
            return ""
        said: Any = getattr(error, "format_message", error.__str__)
        return f"{kind}: {said()}"
    return wrong_keys(name, context.params) if command.whole else ""


def wrong_keys(name: str, values: dict[str, Any]) -> str:
    """Of a configuration that is here, or of one that the reader has, or of a daemon's settings."""
    if (settings := values.get("settings")) and settings.startswith("{"):
        try:
            read_record(json.loads(settings), Settings)
        except ValueError as error:
            return str(error)
    file, overrides = values.get("path"), values.get("overrides") or []
    simulated = name == "simulate"
    if not isinstance(file, Path) or "overrides" not in values or "KEY" in "".join(overrides):
        return ""
    overrides = [each for each in overrides if each != "key=value"]
    try:
        if file.parts[0] in ("examples", "experiments"):
            config.load_as(
                SimulationConfig if simulated else config.RunConfig, ROOT / file, overrides
            )
        elif not simulated:
            config.parse_as(config.RunConfig, SMALLEST, str(file), overrides)
    except config.ConfigError as error:
        return str(error)
    return ""


@cache
def syntax(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def module(name: str) -> Path:
    return ROOT.joinpath(*name.split(".")).with_suffix(".py")


def called(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Calls and the names of what they call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield getattr(node.func, "id", getattr(node.func, "attr", "")), node


def known_flags(file: Path) -> set[str]:
    """Keywords of ``flags(...)``, those of a dict that it is given too, and ``add_argument``'s."""
    tree = syntax(file)
    dicts = {
        each.targets[0].id: each.value
        for each in ast.walk(tree)
        if isinstance(each, ast.Assign)
        and isinstance(each.targets[0], ast.Name)
        and isinstance(each.value, ast.Dict)
    }
    found = {"help"}
    for name, call in called(tree):
        if name == "flags":
            found |= {each.arg for each in call.keywords if each.arg}
            spread = [each.value.id for each in call.keywords if isinstance(each.value, ast.Name)]
            for given in (dicts[each] for each in spread if each in dicts):
                found |= texts(*given.keys)
        elif name == "add_argument":
            found |= {each.removeprefix("--") for each in texts(*call.args)}
    return {f"--{each.replace('_', '-')}" for each in found}


def texts(*nodes: ast.AST | None) -> set[str]:
    """Those of them that are texts."""
    values = {each.value for each in nodes if isinstance(each, ast.Constant)}
    return {each for each in values if isinstance(each, str)}


def known_words(file: Path) -> set[str]:
    """Whatever may be one of its subcommands or choices."""
    nodes = [*ast.walk(syntax(file))]
    names = {each.name for each in nodes if isinstance(each, ast.FunctionDef)}
    return names | texts(*nodes)


def wrong_benchmark(name: str, words: Sequence[str]) -> str:
    """It is there, and so are its flags; where its first word is no flag, it knows that too."""
    file = module(name)
    if not file.is_file():
        return f"no module {name}"
    shared = [
        module(str(each.module))
        for each in syntax(file).body
        if isinstance(each, ast.ImportFrom) and str(each.module).startswith("benchmarks.")
    ]
    known = set().union(*map(known_flags, [file, *filter(Path.is_file, shared)]))
    if unknown := {word.strip("[]").partition("=")[0] for word in words if "--" in word} - known:
        return f"{name} has no {', '.join(sorted(unknown))}"
    first = words[0] if words else "--"
    if first.startswith(("--", "[")) or first.isupper() or first in known_words(file):
        return ""
    return f"{name} knows no {first}"


def test_every_command_on_the_pages_is_one() -> None:
    found = [each for page in pages() for each in commands(page)]
    told = {each: wrong_with(each) for each in found if not each.where.startswith(ASIDE)}
    faults = [f"{each.where}: {' '.join(each.words)}: {why}" for each, why in told.items() if why]
    assert faults == []
    programs = [each.words[0] for each in found if each.whole]
    assert programs.count("rollpacker") > 80
    assert programs.count("make") > 8


def every(command: Any, *names: str) -> Iterator[tuple[str, ...]]:
    """Names of all commands that show themselves."""
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield (*names, name)
            yield from every(inner, *names, name)


def test_the_page_of_commands_has_all_of_them() -> None:
    """Groups within a group by their names."""
    there = {each.words[1:] for each in commands(ROOT / "docs" / "cli.md")}
    lacking = [each for each in every(cli()) if each not in {words[: len(each)] for words in there}]
    assert [each for each in lacking if len(each) < 3] == []


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("rollpacker trian run.yaml", "No such command"),
        ("rollpacker train", "Missing argument"),
        ("rollpacker train run.yaml --resumed auto", "No such option"),
        ("rollpacker train run.yaml train.learning_rat=1", "train.learning_rat"),
        ("rollpacker train examples/scale/none.yaml", "no such config file"),
        ("rollpacker estimate --from PATH --gpus many", "Invalid value for '--gpus'"),
        ("rollpacker mux node drains roll-0", "No such command"),
        ("x=1 .venv/bin/python -m rollpacker samples | tail -1", "Missing argument"),
        ("make tests", "no target"),
        ("rollpacker mux serve --settings '{\"repacks\": false}'", "repacks"),
        ("python examples/scale/large.py", "no file"),
        ("python -m benchmarks.driver.emulation", "no module"),
        ("python -m benchmarks.driver.emulated --gpu 3", "has no --gpu"),
        ("python -m benchmarks.programs.slow_tools tables --steps 3", "knows no tables"),
    ],
)
def test_a_wrong_command_is_found(line: str, why: str) -> None:
    command = next(calls(line))
    assert why in wrong_with(command)


@pytest.mark.parametrize(
    "line",
    [
        "rollpacker train CONFIG [key=value ...] [--resume auto] [--json]",
        "rollpacker mux status|simulate [--json]",
        "rollpacker estimate --from PATH --gpus N > out.txt && make docs",
        "nice rollpacker doctor run.yaml 'engine={kind: vllm}' --device H100   # a comment",
        "python -m benchmarks.programs.slow_tools modes --steps 5",
        "python -m benchmarks.gpu.decode --device cuda",
        'make test ARGS="tests/core -x"',
    ],
)
def test_a_right_one_passes(line: str) -> None:
    found = [*calls(line)]
    assert found
    assert [wrong_with(each) for each in found if wrong_with(each)] == []


def test_files_in_a_block_and_what_a_command_prints_are_no_commands() -> None:
    block = "$ python - <<'END'\nrollpacker nothing\nEND\n$ make docs\nrollpacker prints\n"
    words = [each.words for each in calls(block)]
    assert [each[0] for each in words] == ["python", "make"]
