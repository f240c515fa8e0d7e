"""Settings that are refused, names that the daemon takes, agents of nodes that are not in use."""

import re
import threading
from pathlib import Path

import pytest
from mux_real_daemon import Daemon
from typer.testing import CliRunner

from rollpacker.cli import app
from rollpacker.cli.mux.service import _settings
from rollpacker.config import MuxConfig, RunConfig
from rollpacker.rollmux.model.settings import Prices, Settings
from rollpacker.rollmux.node.agent import NodeAgent
from rollpacker.rollmux.service.client.link import MuxError
from rollpacker.rollmux.service.job.joining import job_id


def test_settings_are_checked() -> None:
    text = '{"permits": "round_robin", "prices": {"rollout": 1.0}, "cold_s": 3}'
    wanted = Settings(permits="round_robin", prices=Prices(rollout=1.0), cold_s=3)
    assert _settings(text) == wanted


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"permits": "foo"}', "permits"),
        ('{"colds": 1}', "colds"),
        ('{"prices": {"gold": 1}}', "gold"),
        ('{"prices": 3}', "prices"),
        ('{"tails": "yes"}', "tails"),
        ("[]", "settings"),
        ("{", "JSON"),
    ],
)
def test_wrong_settings_are_refused(text: str, where: str) -> None:
    with pytest.raises(ValueError, match=where):
        _settings(text)


@pytest.mark.parametrize("folder", ["my run", "_x", "run=1", "é" * 90, "a" * 200, "fine-1.2"])
def test_a_folder_gives_a_name_that_the_daemon_takes(tmp_path: Path, folder: str) -> None:
    config = RunConfig.model_construct(output=str(tmp_path / folder), mux=MuxConfig())
    name = job_id(config)
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", f"{name}.9999")
    assert name == job_id(config)


def test_an_agent_waits_for_its_node_to_be_used(daemon: Daemon) -> None:
    agent = NodeAgent(daemon.client(), "r777", retry_s=0.05)
    found: list[str | None] = []
    thread = threading.Thread(target=lambda: found.append(agent.run()))
    thread.start()
    thread.join(1.0)
    assert thread.is_alive()
    agent.stop.set()
    thread.join(20)
    assert found == [None]


def test_a_node_that_is_not_in_use_may_fail(daemon: Daemon) -> None:
    agent = NodeAgent(daemon.client(), "r777", healthy=lambda: "fire")
    assert agent.run() == "fire"


def test_an_unknown_field_of_any_text_is_said(daemon: Daemon) -> None:
    body = {"id": "odd", "worst_rollout_s": 1.0, "worst_train_s": 1.0}
    said = {"é" * 100: "unknown field", "\ud800" * 100: "no JSON.*surrogate", "\x1b": "character"}
    for number, (field, problem) in enumerate(said.items()):
        with pytest.raises(MuxError, match=problem) as refused:
            daemon.client().call("POST", "/v1/jobs", body | {field: 1}, f"odd-field-{number}")
        assert refused.value.status == 400


def test_a_job_is_ended_by_hand(daemon: Daemon) -> None:
    daemon.job("unwanted")
    words = ["--url", daemon.url, "--token-file", str(daemon.token_file)]
    done = CliRunner().invoke(app, ["mux", "end", "unwanted", *words])
    assert done.stdout == "job unwanted: ended\n"
    assert daemon.client().job("unwanted")["state"] == "ended"
