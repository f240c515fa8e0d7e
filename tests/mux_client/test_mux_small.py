"""Settings that are refused, names that the daemon takes, agents of nodes that are not in use."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
from mux_real_daemon import Daemon, spec
from typer.testing import CliRunner

from rollpacker.cli import app
from rollpacker.cli.mux.service import _settings
from rollpacker.config import MuxConfig, RunConfig
from rollpacker.rollmux.model.settings import Prices, Settings
from rollpacker.rollmux.node.agent import NodeAgent
from rollpacker.rollmux.service.client.client import DaemonLink, MuxError
from rollpacker.rollmux.service.job.submission import job_id


def test_settings_are_checked() -> None:
    text = '{"tails": false, "prices": {"rollout": 1.0}, "cold_s": 3}'
    wanted = Settings(tails=False, prices=Prices(rollout=1.0), cold_s=3)
    assert _settings(text) == wanted


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"nodes": "foo"}', "nodes"),
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
    said = {"é" * 100: "unknown key", "\ud800" * 100: "no JSON.*surrogate", "\x1b": "character"}
    for number, (field, problem) in enumerate(said.items()):
        with pytest.raises(MuxError, match=problem) as refused:
            daemon.client().call("POST", "/v1/jobs", body | {field: 1}, f"odd-field-{number}")
        assert refused.value.status == 400


class Counting(BaseHTTPRequestHandler):
    """Answers, and counts who has connected."""

    protocol_version = "HTTP/1.1"
    connected = 0

    def setup(self) -> None:
        type(self).connected += 1
        super().setup()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
        # Said to be kept, and then closed all the same.
        self.close_connection = self.path == "/last"

    def log_message(self, *_: object) -> None:
        pass


def test_a_link_keeps_its_connection_and_notices_its_end(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token-of-some-length")
    (tmp_path / "token").chmod(0o600)
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Counting,), {})) as server:
        handler: Any = server.RequestHandlerClass
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        link = DaemonLink(url, tmp_path / "token", patience_s=0.0)
        for path in ("/", "/", "/last"):
            assert link.call("GET", path)[1] == {}
        assert handler.connected == 1
        kept = link._kept
        assert kept is not None
        assert wait([kept[0].sock], 10.0)
        assert link.call("GET", "/")[1] == {}, "nobody asks on a connection that has ended"
        assert handler.connected == 2
        threads = [threading.Thread(target=link.call, args=("GET", "/")) for _ in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert handler.connected <= 10
        server.shutdown()
        # Its threads wait for the end of what is kept.
        del link, kept


def test_jobs_are_shown_counted_and_ended_together(daemon: Daemon) -> None:
    for name, team in (("one", "art"), ("two", "art"), ("three", "music")):
        daemon.client().submit(spec(name, team=team))
    shown = daemon.mux("show", "one")
    assert "art, 0" in shown
    assert '"phases": []' in daemon.mux("show", "one", "--json")
    rows = json.loads(daemon.mux("history", "--json"))["team"]
    assert (rows["art"]["jobs"], rows["music"]["ended"]) == (2, 0)
    assert (
        json.loads(daemon.mux("history", "--by", "user", "--json"))["user"]["operator"]["jobs"] == 3
    )
    options = ["--url", daemon.url, "--state", str(daemon.folder)]
    misspelt = CliRunner().invoke(app, ["mux", "hold", "tow", "one", *options])
    assert misspelt.exit_code == 1
    assert "job tow is as it was" in misspelt.output
    assert "there is no job 'tow'" in misspelt.output
    assert "job one: held" in misspelt.output
    assert daemon.mux("hold", "one", "two") == "job one: held\njob two: held\n"
    assert "its release: rollpacker mux release one" in daemon.mux("show", "one")
    assert daemon.mux("release", "one") == "job one: moving\n"
    assert daemon.mux("priority", "two", "7") == "job two: held, priority 7\n"
    assert "art, 7" in daemon.mux("show", "two")
    assert daemon.mux("end", "--all", "--team", "art") == "job one: ended\njob two: ended\n"
    assert daemon.mux("end", "three") == "job three: ended\n"
    assert json.loads(daemon.mux("history", "--json"))["team"]["art"]["ended"] == 2
    wrong = CliRunner().invoke(app, ["mux", "end", "three", "--all", *options])
    assert "name jobs to end, or give --all" in str(wrong.exception)
