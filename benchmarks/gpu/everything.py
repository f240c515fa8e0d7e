"""Everything that only a GPU can show, in one command of at most eight minutes.

    python -m benchmarks.gpu.everything [--trace search.parquet] [--out gpu] [--minutes 8]

Sections run one after the other in processes of their own, each within its time; one that fails or
runs out of time says so in its row and hides nothing of the others. Writes OUT.json and OUT.md.
Without a GPU the same code runs small on the CPU: that shows that it works, not how fast it is.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._run import ROOT, flags

MINUTES = {"cuda": 8.0, "cpu": 40.0}
"""Most of all, if not given; on a CPU, which may be a busy one, it takes about one."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A section: its module, its arguments by device, and its share of eight minutes in seconds.

    ``lines`` says whether it prints one JSON row a line, or one object at its end.
    """

    title: str
    module: str
    cuda: tuple[str, ...]
    cpu: tuple[str, ...] | None
    budget_s: float
    lines: bool = True


PARTS = {
    "decode": Part(
        "Decoding: mini against generate and the memory's limit",
        "benchmarks.gpu.decode",
        ("--device", "cuda"),
        ("--device", "cpu"),
        75.0,
    ),
    "replay": Part(
        "A trace at its recorded lengths on one engine",
        "benchmarks.gpu.replay",
        ("--device", "cuda"),
        ("--device", "cpu"),
        50.0,
    ),
    "grpo": Part(
        "GRPO steps, two workers on one GPU",
        "benchmarks.gpu.grpo",
        ("--device", "cuda"),
        ("--device", "cpu"),
        265.0,
    ),
    "judge": Part(
        "A judge whose layers stream, 32k tokens",
        "benchmarks.gpu.judge_streaming",
        ("--layers", "5", "--repeats", "3"),
        None,
        50.0,
        lines=False,
    ),
    "switch": Part(
        "Warm switch of a job's state against a cold start",
        "benchmarks.mux.switch",
        ("--json", "--hidden", "1024"),
        ("--json", "--hidden", "64", "--layers", "2"),
        30.0,
        lines=False,
    ),
}


def hardware() -> dict[str, str]:
    """The machine's name and versions; ``device`` is what was measured."""
    import torch

    found = {"date": datetime.date.today().isoformat(), "torch": torch.__version__}
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        found |= {"device": "cuda", "name": name, "cuda": str(torch.version.cuda)}
        found["memory_gb"] = f"{torch.cuda.get_device_properties(0).total_memory / 1e9:.0f}"
        return found
    return found | {"device": "cpu", "name": cpu_name(), "cores": str(os.cpu_count())}


def cpu_name() -> str:
    """The processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def run_part(part: Part, arguments: Sequence[str], limit_s: float) -> list[Row]:
    """Its rows; the last one says what went wrong, if anything did."""
    command = [sys.executable, "-m", part.module, *arguments]
    paths = (str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH"))
    path = os.pathsep.join(filter(None, paths))
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=errors,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        wrong = ""
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code, wrong = 0, f"stopped: its {limit_s:.0f} s were over"
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        errors.seek(0)
        rows = read_rows(out.read(), lines=part.lines)
        if code:
            last = [line for line in errors.read().splitlines() if line.strip()][-1:]
            wrong = f"exit code {code}: {''.join(last)[:300]}"
    return [*rows, {"error": wrong}] if wrong else rows


def read_rows(text: str, *, lines: bool) -> list[Row]:
    """Rows of what a section printed; a line that was cut off is none."""
    rows: list[Row] = []
    for piece in text.splitlines() if lines else [text]:
        with contextlib.suppress(json.JSONDecodeError):
            found = json.loads(piece)
            rows += [found] if isinstance(found, dict) else []
    return rows


def flat(row: Row) -> Row:
    """One level of nested objects as ``outer.inner``."""
    cells: Row = {}
    for name, value in row.items():
        inner = value if isinstance(value, dict) else None
        cells |= {name: value} if inner is None else {f"{name}.{k}": v for k, v in inner.items()}
    return cells


def table(rows: list[Row]) -> str:
    """Rows as markdown; what a row lacks stays empty."""
    flattened = [flat(row) for row in rows]
    columns = list(dict.fromkeys(name for row in flattened for name in row))
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in flattened:
        lines.append("| " + " | ".join(cell(row.get(name, "")) for name in columns) + " |")
    return "\n".join(lines)


def cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value).replace("|", "\\|").replace("\n", " ")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def markdown(result: dict[str, Any]) -> str:
    """The whole result, to be read."""
    machine = result["machine"]
    head = f"# {machine['name']}, {machine['date']}\n\n"
    head += ", ".join(f"{k} {v}" for k, v in machine.items() if k not in ("name", "date"))
    if machine["device"] == "cpu":
        head += "\n\nNo GPU: small sizes on the CPU, which show that it runs and nothing else."
    parts = [
        f"## {PARTS[name].title}\n\n{table(found['rows'])}\n\n{found['seconds']:.0f} s"
        for name, found in result["sections"].items()
    ]
    return "\n\n".join([head, *parts]) + "\n"


def arguments_of(name: str, device: str, limit_s: float, trace: str | None) -> list[str] | None:
    """A section's command line, None when it has nothing to measure on this device."""
    part = PARTS[name]
    given = part.cuda if device == "cuda" else part.cpu
    if given is None:
        return None
    words = list(given)
    if part.lines and part.module.startswith("benchmarks.gpu."):
        # It ends by itself before it is stopped, so that what it has is reported whole.
        words += ["--budget", f"{limit_s - 10:.0f}"]
    if name == "replay" and trace is not None:
        words += ["--trace", trace]
    return words


def main() -> None:
    given = flags(
        __doc__,
        trace=(str, "a public trace to replay; default: one is generated"),
        out=(Path("gpu"), "OUT.json and OUT.md"),
        minutes=(float, "most of all; default: 8 on a GPU"),
        only={"nargs": "+", "choices": tuple(PARTS), "default": list(PARTS)},
    ).parse_args()
    begun = time.monotonic()
    machine = hardware()
    total = 60 * (given.minutes or MINUTES[machine["device"]]) - 10
    result: dict[str, Any] = {"machine": machine, "sections": {}}
    for name in given.only:
        start = time.monotonic()
        limit = min(PARTS[name].budget_s * total / 470, total - (start - begun))
        words = arguments_of(name, machine["device"], limit, given.trace)
        if words is None:
            rows: list[Row] = [{"error": "not run: it needs CUDA"}]
        elif limit < 15:
            rows = [{"error": "not reached: the time was over"}]
        else:
            rows = run_part(PARTS[name], words, limit)
        result["sections"][name] = {"rows": rows, "seconds": time.monotonic() - start}
        print(f"{name}: {len(rows)} rows in {time.monotonic() - start:.0f} s", flush=True)
        for suffix, text in ((".json", json.dumps(result, indent=1)), (".md", markdown(result))):
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.with_suffix(suffix).write_text(text, encoding="utf-8")
    print(f"wrote {given.out.with_suffix('.json')} and {given.out.with_suffix('.md')}")


if __name__ == "__main__":
    main()
