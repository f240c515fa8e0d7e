"""The GPU benchmark, which runs small on a CPU: rows, failures that hide nothing, files."""

import importlib
import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(3000)
SECTION = """
import json, sys
print(json.dumps({"shape": "tiny", "words": sys.argv[1:]}), flush=True)
print('{"cut off": ')
raise SystemExit("the model is ill")
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.gpu.everything")


def measured(gpu: Any, out: Path, *words: str) -> dict[str, list[dict[str, Any]]]:
    """Rows of each section."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["everything", "--out", str(out), *words])
        gpu.main()
    result = json.loads(out.with_suffix(".json").read_text())
    text = out.with_suffix(".md").read_text()
    machine = result["machine"]
    assert text.startswith(f"# {machine['name']}, {machine['date']}")
    assert text.count("\n## ") == len(result["sections"])
    return {name: found["rows"] for name, found in result["sections"].items()}


def test_what_is_measured_stands_beside_what_cannot_be(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a small section in place of decoding's, which the test below runs."""
    (tmp_path / "section.py").write_text(SECTION)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(gpu.PARTS, "decode", replace(gpu.PARTS["decode"], module="section"))
    rows = measured(gpu, tmp_path / "gpu", "--only", "decode", "judge")
    device = gpu.hardware()["device"]
    assert rows["decode"] == [
        {"shape": "tiny", "words": ["--device", device]},
        {"error": "exit code 1: the model is ill"},
    ]
    if device == "cpu":
        assert rows["judge"] == [{"error": "not run: it needs CUDA"}]


def test_decoding_is_measured(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which spares its imports."""
    module = gpu.PARTS["decode"].module
    monkeypatch.setattr(sys, "argv", [module, *gpu.arguments_of("decode", "cpu", 100.0, None)])
    runpy.run_module(module, run_name="__main__")
    copied, *rates = gpu.read_rows(capsys.readouterr().out, lines=True)
    assert copied["gb_s"] > 0
    assert [row["batch"] for row in rates] == [1, 8]
    for row in rates:
        assert min(row["mini_tokens_s"], row["generate_tokens_s"], row["limit_tokens_s"]) > 0


@pytest.mark.slow
def test_every_section_runs_and_a_broken_one_hides_nothing(gpu: Any, tmp_path: Path) -> None:
    rows = measured(gpu, tmp_path / "gpu")
    assert [row["batch"] for row in rows["decode"][1:]] == [1, 8]
    off, race = rows["replay"]
    assert off["generated_tokens"] == off["kept_tokens"]
    assert race["decode_steps"] < off["decode_steps"]
    assert race["generated_tokens"] > race["kept_tokens"]
    assert [row["mode"] for row in rows["grpo"]] == ["off", "exact", "race"]
    assert all(row["step_s"] > 0 and "error" not in row for row in rows["grpo"])
    assert rows["switch"][0]["cold_s"] > rows["switch"][0]["warm_s"] > 0
    missing = str(tmp_path / "missing.parquet")
    again = ("--only", "replay", "switch", "--trace", missing)
    broken = measured(gpu, tmp_path / "again", *again)
    assert "missing.parquet" in broken["replay"][0]["error"]
    assert broken["switch"][0]["warm_s"] > 0


@pytest.mark.slow
def test_a_section_without_time_says_so(gpu: Any, tmp_path: Path) -> None:
    rows = measured(gpu, tmp_path / "gpu", "--only", "decode", "--minutes", "0.2")
    assert rows["decode"] == [{"error": "not reached: the time was over"}]
