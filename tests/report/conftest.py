from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from episode_runs import make_episodes
from report_runs import MODES, make_run


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> dict[str, Path]:
    """One run folder of each mode; read only."""
    root = tmp_path_factory.mktemp("runs")
    return {mode: make_run(root / mode, mode) for mode in MODES}


@pytest.fixture
def copy(made, tmp_path):
    """A copy of a mode's run folder to damage."""

    def copied(mode: str) -> Path:
        return Path(shutil.copytree(made[mode], tmp_path / mode))

    return copied


@pytest.fixture(scope="session")
def episodes(tmp_path_factory) -> Path:
    """A run with an environment; read only."""
    return make_episodes(tmp_path_factory.mktemp("episodes") / "run")
