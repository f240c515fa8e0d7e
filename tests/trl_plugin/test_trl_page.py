"""The script of docs/trl.md, as it stands there."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import ROOT, blocks
from runtime_jobs import write_byte_model

from rollpacker.core import journal
from rollpacker.policy.rollout import from_journal

pytestmark = pytest.mark.trl


def test_the_script_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small model in the place of the hub's, and two steps."""
    (script,) = (each.text for each in blocks(ROOT / "docs" / "trl.md") if each.title == "train.py")
    assert len(script.splitlines()) < 35
    write_byte_model(tmp_path / "model")
    for given, ours in (("Qwen/Qwen2.5-0.5B-Instruct", "model"), ("max_steps=50", "max_steps=2")):
        assert script.count(given) == 1
        script = script.replace(given, ours)
    monkeypatch.chdir(tmp_path)
    exec(compile(script, "train.py", "exec"), {"__name__": "__main__"})
    folder = tmp_path / "products" / "rollpacker"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    assert journal.replay(folder / "journal.jsonl", from_journal).differences == []
