"""The first run on a machine compiles the engine's kernels, and says so before."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from numba import njit
from runtime_jobs import Workshop, cli

from rollpacker.cli import main
from rollpacker.config import MiniEngineConfig
from rollpacker.demo.model import build_model, build_tokenizer
from rollpacker.engine.compiling import COMPILING, told_of_compiling
from rollpacker.engine.mini.cpu import runner
from rollpacker.engine.mini.engine import MiniEngine
from rollpacker.polytrace import formats
from rollpacker.polytrace.model.workload import generate, load_model
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.worker.engine_worker import measured

SMALL = MiniEngineConfig(max_running=4)


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> MiniEngine:
    """An engine with a kernel that is on no disk."""
    kernel = njit(nogil=True, error_model="numpy")(runner.project.py_func)
    monkeypatch.setattr(runner, "project", kernel)
    return MiniEngine(build_model(0), config=SMALL)


def test_a_line_comes_before_the_first_kernel_is_compiled(cold: MiniEngine) -> None:
    said: list[str] = []
    with told_of_compiling(said.append):
        njit(lambda: None)()
        assert said == [], "it is no kernel"
        cold.info()
    assert said == [COMPILING]
    with told_of_compiling(said.append):
        cold.info()
    assert said == [COMPILING], "nothing was compiled any more"


def test_a_worker_tells_its_driver(cold: MiniEngine) -> None:
    sent: list[msg.Report] = []
    measured(cold, sent.append, 8)
    measured(cold, sent.append, 8)
    assert sent == [msg.Noted(text=COMPILING)]


@pytest.mark.usefixtures("cold")
def test_a_replay_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build_model(0).save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    trace = generate(load_model("math"), steps=1, prompts=1)
    formats.write(trace, tmp_path / "t.parquet", "native")
    words = "replay t.parquet --model model --max-tokens-scale 0.001"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rollpacker", "trace", *words.split()])
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code
    assert capsys.readouterr().err.count(f"note: {COMPILING}\n") == 1


@pytest.mark.slow
def test_a_run_says_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    shop = Workshop(tmp_path)
    said: list[int] = []
    for name in ("first", "second"):
        done = cli("train", shop.file(name, steps=1, devices__per_node=2), timeout=280)
        assert done.returncode == 0, done.stderr
        said.append(done.stderr.count(COMPILING))
    assert said == [1, 0]
