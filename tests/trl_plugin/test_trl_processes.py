"""Two processes of accelerate, gloo between them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.trl

SCRIPT = Path(__file__).with_name("two_processes.py")


def run(what: str, folder: Path) -> list[dict[str, Any]]:
    """What each of the two says."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = subprocess.run(
        [*command, "--nproc_per_node=2", str(SCRIPT), what, str(folder)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    said = sorted(folder.glob("said-*.json"))
    assert len(said) == 2, ended.stderr[-3000:]
    return [json.loads(file.read_text()) for file in said]


def test_two_processes_train_as_with_plain_trl(tmp_path: Path) -> None:
    said = run("exact", tmp_path)
    assert len({line["ours"] for line in said} | {line["plain"] for line in said}) == 1
    assert all(line["steps"] == 12 for line in said)
    assert (tmp_path / "ours" / "rollpacker" / "rank-1" / "journal.jsonl").exists()


def test_two_processes_race_through_every_epoch_together(tmp_path: Path) -> None:
    said = run("race", tmp_path)
    assert len({line["ours"] for line in said}) == 1
    for line in said:
        assert "6 responses on each device" in line["refused"]
        assert "must be a multiple of num_generations=4" in line["refused"]
    # 25 prompts, four a step: one is left out, as by TRL's own sampler.
    for epoch in range(2):
        half = [line["prompts"][epoch * 48 : (epoch + 1) * 48] for line in said]
        counts = Counter(prompt for prompts in half for prompt in prompts)
        assert len(counts) == 24
        assert set(counts.values()) == {4}
