"""The GPU benchmark, which runs small on a CPU: facts, failures that hide nothing, the file."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(3000)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.gpu.first_hour")


def facts(gpu: Any, out: Path, *words: str) -> dict[str, list[dict[str, Any]]]:
    """Lines of each part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["first_hour", "--out", str(out), "--device", "cpu", *words])
        gpu.main()
    found: dict[str, list[dict[str, Any]]] = {}
    for line in out.read_text().splitlines():
        fact = json.loads(line)
        found.setdefault(fact["part"], []).append(fact)
    return found


@pytest.mark.parametrize("part", ["copies", "draws", "mesh", "tasks", "decode"])
def test_a_part_gives_facts(gpu: Any, tmp_path: Path, part: str) -> None:
    """In this process, which spares its imports."""
    found = facts(gpu, tmp_path / "out.jsonl", "--alone", part)[part]
    numbers = {name: v for fact in found for name, v in fact.items() if isinstance(v, float)}
    assert len(found) >= 1
    assert all(value >= 0 for value in numbers.values())
    expected = {
        "copies": {("out", False), ("out", True), ("in", False), ("in", True)},
        "mesh": {tuple(range(8))},
        "decode": {"mini", "generate"},
    }
    seen = {
        "copies": {(fact.get("way"), fact.get("page_locked")) for fact in found},
        "mesh": {tuple(fact.get("reduced", ())) for fact in found},
        "decode": {fact.get("engine") for fact in found},
    }
    assert seen.get(part) == expected.get(part)


def test_a_part_that_fails_hides_nothing(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_device: str) -> Iterator[dict[str, Any]]:
        yield {"first": 1}
        raise OSError("the model is ill")

    monkeypatch.setitem(gpu.PARTS, "draws", broken)
    out = tmp_path / "out.jsonl"
    with pytest.raises(OSError, match="ill"):
        facts(gpu, out, "--alone", "draws")
    assert json.loads(out.read_text())["first"] == 1
    monkeypatch.setattr(gpu, "LIMIT_S", dict.fromkeys(gpu.LIMIT_S, 6))
    monkeypatch.setattr(gpu, "SCRIPT", "benchmarks.gpu.no_such_script")
    found = facts(gpu, out, "--parts", "copies", "mesh")
    assert all("exit code 1" in found[part][0]["error"] for part in ("copies", "mesh"))
    late = facts(gpu, tmp_path / "late.jsonl", "--parts", "copies", "--until", "1")
    assert late == {"copies": [{"part": "copies", "error": "not reached"}]}


@pytest.mark.slow
@pytest.mark.cluster
def test_every_part_runs(gpu: Any, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    found = facts(gpu, tmp_path / "out.jsonl")
    assert set(found) == set(gpu.PARTS)
    assert not [fact for part in found.values() for fact in part if "error" in fact]
