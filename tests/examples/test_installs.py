"""What the README of an example installs has what its programs import, and no neighbour's does."""

from __future__ import annotations

import ast
import shlex
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.wide

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
INSTALL = "pip install "


def installs(readme: Path) -> list[str]:
    """The words of its first line that installs something; none where it has no such line."""
    lines = readme.read_text(encoding="utf-8").splitlines()
    line = next((line for line in lines if line.startswith(INSTALL)), "")
    return [word for word in shlex.split(line, comments=True)[2:] if word != "-e"]


READMES = {path.parent.name: path for path in sorted(ROOT.glob("examples/*/README.md"))}
EXAMPLES = {name: found for name, path in READMES.items() if (found := installs(path))}


def required(wanted: Requirement) -> Iterator[Requirement]:
    """What a package brings with it, itself not among it."""
    if canonicalize_name(wanted.name) == "rollpacker":
        lines = list(PROJECT["dependencies"])
        for extra in wanted.extras:
            lines += PROJECT["optional-dependencies"][extra]
        yield from map(Requirement, lines)
        return
    try:
        lines = requires(wanted.name) or []
    except PackageNotFoundError:  # nothing is known of what is not here
        return
    for line in lines:
        needed = Requirement(line)
        extras = wanted.extras or {""}
        if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in extras):
            yield needed


def closure(words: Iterable[str]) -> set[str]:
    """Names of all packages that an install line brings."""
    waiting = [Requirement(f"rollpacker{w[1:]}" if w.startswith(".") else w) for w in words]
    seen: set[str] = set()
    names: set[str] = set()
    while waiting:
        wanted = waiting.pop()
        if str(wanted) not in seen:
            seen.add(str(wanted))
            names.add(canonicalize_name(wanted.name))
            waiting += required(wanted)
    return names


def imported(folder: Path) -> set[str]:
    """Modules that its programs import from elsewhere."""
    found: set[str] = set()
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    own = {file.stem for file in folder.glob("*.py")}
    return found - own - set(sys.stdlib_module_names) - {"rollpacker", "__future__"}


def lacking(modules: Iterable[str], words: Iterable[str]) -> set[str]:
    """Modules that an install line does not bring."""
    names, of = closure(words), packages_distributions()
    return {m for m in modules if not {canonicalize_name(n) for n in of.get(m, [m])} & names}


def test_the_examples_are_looked_at() -> None:
    assert {"agent", "code", "smollm2", "tools"} <= set(EXAMPLES)
    assert imported(ROOT / "examples" / "agent") == {"openai"}
    assert "torch" in imported(ROOT / "examples" / "tools")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_install_line_has_what_its_programs_import(name: str) -> None:
    assert lacking(imported(ROOT / "examples" / name), EXAMPLES[name]) == set()


def test_what_a_line_lacks_is_found() -> None:
    """Also where it is here: what brings it may bring another thing tomorrow."""
    words = EXAMPLES["agent"]
    assert lacking({"openai", "torch", "hypothesis", "mkdocs"}, words) == {"hypothesis", "mkdocs"}
    assert lacking({"torch", "numpy", "plotly"}, ["."]) == {"torch", "plotly"}
    assert lacking({"plotly", "jinja2"}, [".[report]"]) == set()
