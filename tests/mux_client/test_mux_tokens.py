"""Tokens with roles, on a real daemon: who may do what, whose jobs, and what is written of it."""

import json
from pathlib import Path
from typing import Any

import pytest
from mux_real_daemon import Daemon, spec
from typer.testing import CliRunner

from rollpacker.cli import app
from rollpacker.rollmux.service.api.roles import OPERATOR
from rollpacker.rollmux.service.client.client import MuxClient, MuxError, new_key
from rollpacker.rollmux.service.http.tokens import FILE, Tokens


def test_a_file_that_cannot_be_read_starts_no_daemon(tmp_path: Path) -> None:
    file = tmp_path / FILE
    header = b"Bearer " + Tokens(file, b"secret").add("a", "read").encode()
    assert str(Tokens(file, b"secret").principal(header)) == "a (read)"
    assert Tokens(file, b"secret").principal(b"Bearer secret") == OPERATOR
    file.write_bytes(b"[{")
    with pytest.raises(ValueError, match=r"tokens.json is not a file of tokens"):
        Tokens(file, b"secret")


def client(daemon: Daemon, folder: Path, name: str, *words: str) -> MuxClient:
    """Of somebody for whom a token is made."""
    file = folder / name
    daemon.mux("token", "add", name, *words, "--to", str(file))
    return MuxClient(daemon.url, file, patience_s=20.0)


def refused(ask: Any, *words: Any) -> str:
    with pytest.raises(MuxError) as error:
        ask(*words)
    assert error.value.status == 403
    assert error.value.code == "forbidden"
    return str(error.value)


def test_teams_keep_their_hands_off_each_others_jobs(daemon: Daemon, tmp_path: Path) -> None:
    reader = client(daemon, tmp_path, "reader", "--role", "read")
    math = client(daemon, tmp_path, "math", "--role", "submit", "--team", "math")
    code = client(daemon, tmp_path, "code", "--role", "submit", "--team", "code")
    assert reader.status()["jobs"] == []
    assert "reader (read)" in refused(reader.submit, spec("mine", team="math"))
    assert "not for jobs of team 'code'" in refused(math.submit, spec("theirs", team="code"))
    math.submit(spec("mine", team="math"))
    assert "code (submit, team code)" in refused(code.end, "mine")
    refused(code.permit, "mine", "rollout", new_key())
    permit = math.permit("mine", "rollout", new_key())
    assert permit is not None
    refused(code.heartbeat, permit)
    refused(code.finish, permit, 1.0, new_key())
    assert math.finish(permit, 1.0, new_key())["next"] == "train"  # type: ignore[arg-type]
    refused(math.call, "POST", "/v1/drain", {}, new_key())
    refused(reader.call, "GET", "/v1/journal")
    assert code.job("mine")["done"] == 0
    math.end("mine")
    noted = [json.loads(line) for line in (daemon.folder / "audit.jsonl").read_text().splitlines()]
    found = [(line["by"], line["path"], line["status"]) for line in noted]
    assert ("math", "/v1/jobs", 201) in found
    assert ("code", "/v1/jobs/mine/end", 403) in found
    assert ("math", "/v1/jobs/mine/end", 200) in found
    assert ("reader", "/v1/jobs", 403) in found
    assert not [line for line in found if line[1].endswith("permits") and line[2] < 300]


def test_a_revoked_token_counts_no_more(daemon: Daemon, tmp_path: Path) -> None:
    gone = client(daemon, tmp_path, "gone", "--role", "operate")
    assert gone.status()
    daemon.mux("token", "revoke", "gone")
    with pytest.raises(MuxError, match="refuses this token"):
        gone.status()
    assert "gone" not in daemon.mux("token", "list")
    file = daemon.folder / "tokens.json"
    assert file.stat().st_mode & 0o077 == 0
    assert all(each["sha256"] and "token" not in each for each in json.loads(file.read_text()))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("operator", "--role", "read"), "and is not 'operator'"),
        (("a b", "--role", "read"), "a name has 1 to 64 characters"),
        (("c", "--role", "read", "--team", "x"), "a team (--team) is for the role submit"),
        (("d", "--role", "read", "--to", "/no/such/folder/d"), "--to /no/such/folder/d: No such"),
    ],
)
def test_mistakes_are_said(daemon: Daemon, words: tuple[str, ...], said: str) -> None:
    here = ("--url", daemon.url, "--state", str(daemon.folder))
    found = CliRunner().invoke(app, ["mux", "token", "add", *words, *here])
    assert isinstance(found.exception, ValueError)
    assert said in str(found.exception)
