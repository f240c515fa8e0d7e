"""``rollpacker mux simulate``, ``backup`` and ``restore`` as a user calls them."""

import json
from pathlib import Path

import pytest
from event_check import check_file
from typer.testing import CliRunner

from rollpacker.cli import app
from rollpacker.rollmux.service.store import Store

SMALL = ["--jobs", "3", "--days", "0.1", "--json"]


def call(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["mux", *args])
    if isinstance(done.exception, ValueError):
        raise done.exception
    return done.exit_code, done.stdout


@pytest.mark.parametrize("policy", ["solo", "rollmux"])
def test_simulate_prints_what_scripts_need_and_its_log_passes(tmp_path: Path, policy: str) -> None:
    events = tmp_path / "events.jsonl"
    code, text = call(
        "simulate", *SMALL, "--policy", policy, "--slo", "2,3", "--events", str(events)
    )
    assert code == 0
    found = json.loads(text)
    assert found["jobs_done"] == 3
    assert found["cost_per_h"] >= found["lower_bound_cost_per_h"] > 0
    assert set(found["bubble"]) == set(found["peak_gpus"]) == {"rollout", "train"}
    assert {"cost_dollars", "span_h", "gpu_hours", "slo_attained", "worst_slo_ratio"} < set(found)
    assert set(found["decision_ms"]) == {"p50", "p99"}
    assert {each.rule for each in check_file(events)} <= {"slo"}


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["--slo", "1"], "expected LOW,HIGH"),
        (["--slo", "0.5,2"], "1 <= LOW"),
    ],
)
def test_mistakes_are_said(args: list[str], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        call("simulate", *args)


def test_a_backup_and_its_restore(tmp_path: Path) -> None:
    state, copy = tmp_path / "mux", tmp_path / "copy"
    state.mkdir()
    Store(state / "mux.sqlite").close()
    assert call("backup", str(copy), "--state", str(state)) == (
        0,
        f"{copy}: the database up to entry 0\n",
    )
    code, text = call("restore", str(copy), "--state", str(tmp_path / "new"))
    assert (code, "No permit is granted for one lease" in text) == (0, True)
    Store(tmp_path / "new/mux.sqlite").close()


def test_before_any_daemon_there_is_one_clear_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"no runs/mux/token: no daemon was started here .* --url"):
        call("status")
    with pytest.raises(ValueError, match=r"\(--token-file\): there is no mine. A daemon makes"):
        call("status", "--token-file", "mine")
    Path("runs").touch()
    with pytest.raises(ValueError, match=r"\(--token-file\): .*Not a directory"):
        call("status", "--state", "runs")


def test_a_table_for_people() -> None:
    code, text = call("simulate", *SMALL[:-1])
    assert code == 0
    assert "SLO kept" in text
