"""Where an engine that loads a model's shape by itself finds it."""

import json

import pytest

from rollpacker import hub
from rollpacker.hub import config_folder, folder_here

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """A model that was loaded from the hub before, and no connection now."""
    folder = tmp_path / "models--some--model"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    for module in ("constants", "file_download"):
        monkeypatch.setattr(f"huggingface_hub.{module}.HF_HUB_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr(hub, "answers", lambda *_: False)
    return snapshot


def test_a_folder_below_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    assert config_folder("~/m") == str(tmp_path / "m")


def test_a_model_in_the_cache_without_a_connection(cached):
    assert config_folder("some/model") == str(cached)
    assert (folder_here("some/model"), folder_here("some/other")) == (cached, None)
    assert (folder_here(str(cached)), folder_here("")) == (cached, None)
    with pytest.raises(ValueError, match="cannot be reached"):
        config_folder("some/other")
