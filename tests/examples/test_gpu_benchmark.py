"""The GPU benchmark, which runs small on a CPU: rows, failures that hide nothing, files."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
pytestmark = pytest.mark.timeout(3000)


def measured(out: Path, *words: str) -> dict[str, list[dict[str, Any]]]:
    """Rows of each section, of the script in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(BENCHMARK), "--out", str(out), *words])
        runpy.run_path(str(BENCHMARK), run_name="__main__")
    result = json.loads(out.with_suffix(".json").read_text())
    text = out.with_suffix(".md").read_text()
    machine = result["machine"]
    assert text.startswith(f"# {machine['name']}, {machine['date']}")
    assert text.count("\n## ") == len(result["sections"])
    return {name: found["rows"] for name, found in result["sections"].items()}


def test_what_is_measured_stands_beside_what_cannot_be(tmp_path: Path) -> None:
    rows = measured(tmp_path / "gpu", "--only", "decode", "judge")
    copied, *rates = rows["decode"]
    assert copied["gb_s"] > 0
    assert [row["batch"] for row in rates] == [1, 8]
    for row in rates:
        assert min(row["mini_tokens_s"], row["generate_tokens_s"], row["limit_tokens_s"]) > 0
    import torch

    if not torch.cuda.is_available():
        assert rows["judge"] == [{"error": "not run: it needs CUDA"}]


@pytest.mark.slow
def test_every_section_runs_and_a_broken_one_hides_nothing(tmp_path: Path) -> None:
    rows = measured(tmp_path / "gpu")
    off, exact, race = rows["replay"]
    assert off["generated_tokens"] == exact["generated_tokens"] == off["kept_tokens"]
    assert race["decode_steps"] < off["decode_steps"]
    assert race["generated_tokens"] > race["kept_tokens"]
    assert [row["mode"] for row in rows["grpo"]] == ["off", "exact", "race"]
    assert all(row["step_s"] > 0 and "error" not in row for row in rows["grpo"])
    assert rows["switch"][0]["cold_s"] > rows["switch"][0]["warm_s"] > 0
    missing = str(tmp_path / "missing.parquet")
    broken = measured(tmp_path / "again", "--only", "replay", "switch", "--trace", missing)
    assert "missing.parquet" in broken["replay"][0]["error"]
    assert broken["switch"][0]["warm_s"] > 0


@pytest.mark.slow
def test_a_section_without_time_says_so(tmp_path: Path) -> None:
    rows = measured(tmp_path / "gpu", "--only", "decode", "--minutes", "0.2")
    assert rows["decode"] == [{"error": "not reached: the time was over"}]
