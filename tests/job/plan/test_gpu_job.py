"""What a job gets where this machine has GPUs, which are pretended here."""

from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from runtime_jobs import Workshop

from rollpacker.config import RunConfig
from rollpacker.job.plan import defaults
from rollpacker.job.plan.defaults import with_gpu_defaults
from rollpacker.runtime.record.progress import Progress
from rollpacker.sim.memory.needs import JobMachine


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    made = Workshop(tmp_path, rows=4).config("here")
    tree = made.model_dump(mode="json")
    for section in ("engine", "devices"):
        del tree[section]
    del tree["model"]["dtype"]
    for key in ("micro_batch_tokens", "gradient_checkpointing"):
        del tree["train"][key]
    return RunConfig.model_validate(tree)


def on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, config: RunConfig, found: Any = None, *, gb: float = 24
) -> tuple[RunConfig, str]:
    machine = JobMachine(
        name="L4", cuda=True, devices=1, device_bytes=gb * 1e9, workers=1, on_device=1
    )
    monkeypatch.setattr(defaults, "machine_here", lambda _config: machine)
    monkeypatch.setattr(defaults, "_has_vllm", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    said = StringIO()
    chosen = with_gpu_defaults(config, Progress(Console(file=said, width=999)), found)
    return chosen, said.getvalue()


def test_a_line_says_what_was_chosen(monkeypatch: pytest.MonkeyPatch, config: RunConfig) -> None:
    chosen, said = on_a_gpu(monkeypatch, config)
    assert (chosen.engine.kind, chosen.model.dtype) == ("vllm", "bfloat16")
    assert "on L4, for keys that the job leaves out: model.dtype=bfloat16" in said
    assert "WARNING" not in said


def test_a_run_goes_on_with_what_it_had(monkeypatch: pytest.MonkeyPatch, config: RunConfig) -> None:
    before = {
        "model": {"dtype": "float32"},
        "engine": {"kind": "mini", "max_running": 32},
        "train": {"micro_batch_tokens": 1024, "gradient_checkpointing": False},
    }
    found = cast(Any, SimpleNamespace(state={"config": before}))
    chosen, said = on_a_gpu(monkeypatch, config, found)
    assert (chosen.engine.kind, chosen.model.dtype) == ("mini", "float32")
    assert chosen.train.micro_batch_tokens == 1024
    assert not said


def test_what_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch, config: RunConfig) -> None:
    _, said = on_a_gpu(monkeypatch, config, gb=1.0)
    assert "the job does not fit by arithmetic" in said


def test_a_cpu_and_other_machines_change_nothing(config: RunConfig) -> None:
    assert with_gpu_defaults(config, Progress()) is config
    cluster = config.cluster.model_copy(update={"address": "auto"})
    remote = config.model_copy(update={"cluster": cluster})
    assert with_gpu_defaults(remote, Progress()) is remote
