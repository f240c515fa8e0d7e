"""Runs of earlier versions are resumed, replayed and reported by this one."""

import json
import shutil
from collections import Counter
from pathlib import Path

import polars as pl
import pytest
import yaml
from runtime_jobs import asked_today, checkpoints, kept_groups, metrics, run, times_trained

from rollpacker import config
from rollpacker.core import journal
from rollpacker.job.plan.resume import as_of_now
from rollpacker.policy.rollout import from_journal
from rollpacker.report.run_report import write_report
from rollpacker.report.timeline import write_timeline

STORED = Path(__file__).parents[2] / "stored"


def settled(folder: Path, steps: int) -> list[float]:
    return [row["loss"] for row in metrics(folder)[:steps]]


@pytest.fixture(scope="module", params=["v0_1_0", "v0_1_0_engines"])
def resumed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stored run, killed in step 7 after checkpoint-6, gone on with to its end."""
    folder = tmp_path_factory.mktemp("stored") / request.param
    shutil.copytree(STORED / request.param, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        _, said = run(config.load(asked_today(folder), []), resume=True)
    assert "6 of them done before" in said
    assert "tokens were drawn by inverse CDF" in said
    summary = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["steps"] == checkpoints(folder / "run")[-1]
    return folder / "run"


def test_a_stored_run_is_resumed(resumed: Path) -> None:
    rows = (resumed.parent / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    expected = Counter({json.loads(row)["id"]: 2 for row in rows})
    assert times_trained(resumed) == expected
    assert set(kept_groups(resumed).values()) == {3}
    before = STORED / resumed.parent.name / "run"
    assert settled(resumed, 6) == settled(before, 6)
    assert [row["step"] for row in metrics(resumed)] == list(range(checkpoints(resumed)[-1]))
    assert all("eval/sampled_accuracy" in row for row in metrics(resumed)[1::2])


def test_it_goes_on_as_it_began(resumed: Path) -> None:
    kept = config.load(resumed / "config.yaml")
    first = resumed.parent.name == "v0_1_0"
    assert kept.rollout.min_reward_range == (1e-3 if first else 0.0)
    assert kept.train.kl_bias_correction is not first
    assert getattr(kept.train.algorithm, "scale_rewards", None) == "group"


def test_its_journal_replays(resumed: Path) -> None:
    replay = journal.replay(resumed / "journal.jsonl", from_journal)
    assert replay.differences == []
    assert replay.unfinished is None


@pytest.mark.parametrize("name", ["v0_1_0", "v0_1_0_engines"])
def test_todays_keys_are_asked_of_a_job_file_and_not_of_a_runs_own(name: str) -> None:
    with pytest.raises(config.ConfigError, match=r"workers\.count -> devices\.per_node"):
        config.load(STORED / name / "job.yaml")
    own = STORED / name / "run" / "config.yaml"
    assert "workers" in yaml.safe_load(own.read_text(encoding="utf-8"))
    chosen = config.load(own, ["devices.threads=2"])
    assert chosen.devices == config.DevicesConfig(per_node=1, threads=2, pin=False, kind="cpu")
    assert chosen.cluster == config.ClusterConfig()
    with pytest.raises(config.ConfigError, match=r"workers\.threads -> devices\.threads"):
        config.load(own, ["workers.threads=2"])


@pytest.mark.parametrize("name", ["v0_1_0", "v0_1_0_engines"])
def test_the_stored_files_are_read_as_they_are(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(STORED / name / "run", folder)
    assert journal.replay(folder / "journal.jsonl", from_journal).differences == []
    assert write_report(folder).stat().st_size > 10_000
    assert json.loads(write_timeline(folder).read_text(encoding="utf-8"))["traceEvents"]


def test_its_report_is_written_again(resumed: Path) -> None:
    assert write_report(resumed).stat().st_size > 10_000
    assert json.loads(write_timeline(resumed).read_text(encoding="utf-8"))["traceEvents"]


def test_what_an_old_config_lacks_is_the_behaviour_of_then() -> None:
    path = STORED / "v0_1_0" / "run" / "checkpoint-6" / "state.json"
    old = json.loads(path.read_text(encoding="utf-8"))["config"]
    assert "grace_s" not in old["checkpoint"]
    del old["data"]["shuffle"], old["rewards"][0]["timeout_s"], old["grading"]
    assert "workers" in old
    now = as_of_now(old, {"data.shuffle": False, "rewards.*.timeout_s": 77.0})
    assert now["checkpoint"]["grace_s"] == 25.0
    assert now["data"]["shuffle"] is False
    assert now["rewards"][0]["timeout_s"] == 77.0
    assert now["grading"]["workers"] >= 1
    assert now["devices"]["per_node"] == 1
    assert "workers" not in now
    # A value that was written counts, not that of then.
    assert as_of_now(now, {"data.shuffle": True})["data"]["shuffle"] is False
    assert as_of_now(old | {"gone": 1}, {})["gone"] == 1


def test_what_a_stored_run_of_mode_partial_carried_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "partial"
    shutil.copytree(STORED / "v0_2_0_partial", folder)
    monkeypatch.chdir(folder)
    _, said = run(config.load(folder / "job.yaml"), resume=True)
    assert "6 of them done before" in said
    rows = (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert times_trained(folder / "run") == {json.loads(row)["id"]: 2 for row in rows}
    assert settled(folder / "run", 6) == settled(STORED / "v0_2_0_partial" / "run", 6)
    samples = pl.read_parquet(folder / "run" / "samples.parquet")
    first = samples.filter((pl.col("step") == 6) & (pl.col("state") == "kept"))
    assert first["stale_tokens"].max() == 40, "one that older weights had sampled whole"
    replay = journal.replay(folder / "run" / "journal.jsonl", from_journal)
    assert replay.differences == []
