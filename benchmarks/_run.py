"""What benchmarks share: their command lines, runs and processes, and what they print."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COMMAND = (sys.executable, "-c", "from rollpacker.cli import main; main()")
"""``rollpacker``, of this interpreter."""


def flags(doc: str | None, **options: Any) -> argparse.ArgumentParser:
    """A parser with a flag for each option.

    An option is its default; a type, where there is none; False, for a switch; a list, for
    several; a pair of one of these and its help; or what ``add_argument`` takes.
    """
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=plain)
    for name, option in options.items():
        value, text = option if isinstance(option, tuple) else (option, None)
        more: dict[str, Any] = {"default": value, "type": type(value)}
        if isinstance(value, dict):
            more = value
        elif value is False:
            more = {"action": "store_true"}
        elif isinstance(value, type):
            more = {"type": value}
        elif isinstance(value, list):
            more |= {"type": type(value[0]), "nargs": "+"}
        parser.add_argument(f"--{name.replace('_', '-')}", help=text, **more)
    return parser


def table(head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> None:
    """Print a table; every column but the first is one of numbers."""
    names = [*head]
    print(f"| {' | '.join(map(str, names))} |\n|---|{'--:|' * (len(names) - 1)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)


def listed(ratios: Sequence[float]) -> str:
    """The ratios of all rounds, and their median."""
    return f"{', '.join(f'{r:.2f}' for r in ratios)} (median {statistics.median(ratios):.2f})"


def lines(path: Path) -> list[dict[str, Any]]:
    """JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def metrics(run: Path) -> list[dict[str, Any]]:
    """Of each step of a run."""
    return lines(run / "metrics.jsonl")


def summary(run: Path) -> dict[str, Any]:
    """Of a run that has ended."""
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))


def made(run: Path) -> bool:
    """Whether a run is there already, and is not repeated."""
    return (run / "summary.json").exists()


def apart(module: str, *words: str) -> dict[str, Any]:
    """What a benchmark prints as JSON in a process of its own, which inherits no heap of ours."""
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def daemon(*words: str) -> Iterator[str]:
    """The address of ``rollpacker mux serve WORDS`` while it lasts."""
    command = [*COMMAND, "mux", "serve", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("listening"), "the daemon did not start"
        yield said.split()[2].rstrip(",")
    finally:
        process.terminate()
        process.wait()


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """JSON lines, in a folder that is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
