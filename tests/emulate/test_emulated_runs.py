"""Whole runs on emulated devices: driver, channels, grading and logs are real."""

import json
import multiprocessing
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pytest
from emulated_jobs import job, write_devices, write_model
from rich.console import Console

from rollpacker import job as jobs
from rollpacker.config import RunConfig
from rollpacker.core import journal
from rollpacker.emulate import worker
from rollpacker.emulate.paper_job import Paper, paper_job
from rollpacker.emulate.twin import simulate
from rollpacker.job.ask.doctor import look
from rollpacker.policy.rollout import from_journal
from rollpacker.report.reading.run_folder import load_run
from rollpacker.runtime.cluster.nodes import PRELOADED
from rollpacker.runtime.record.progress import Progress
from rollpacker.sim.costs import calibration
from rollpacker.sim.costs.models import find_model
from rollpacker.sim.recorded.run_record import read_run


def train(config: RunConfig, *, resume: bool = False) -> tuple[Path, str]:
    said = StringIO()
    console = Console(file=said, width=400)
    return jobs.train(config, resume=resume, progress=Progress(console)), said.getvalue()


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module", autouse=True)
def imported_once() -> Iterator[None]:
    """Processes of workers are forked off the one that those of other runs are forked off, which
    spares their imports; ``test_emulated_hosts`` starts them as users do."""
    forked = SimpleNamespace(get_context=lambda _: multiprocessing.get_context("forkserver"))
    multiprocessing.set_forkserver_preload([*PRELOADED])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "multiprocessing", forked)
        yield


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return train(job(tmp_path_factory.mktemp("exact"), rollout__planner="paper"))


def test_a_run_keeps_what_the_simulator_keeps(exact: tuple[Path, str]) -> None:
    folder, _ = exact
    run, simulated = load_run(folder), simulate(folder)
    assert set(run.samples["state"]) == {"kept"}
    assert Counter(run.samples["prompt"]) == Counter({f"p{n}": 4 for n in range(24)})
    tokens = dict(run.samples.group_by("step").agg(pl.col("tokens").sum()).iter_rows())
    assert tokens == {step.step: step.kept_tokens for step in simulated}
    assert journal.replay(folder / "journal.jsonl", from_journal).differences == []


def test_seconds_are_emulated(exact: tuple[Path, str]) -> None:
    """At this factor the driver adds what it likes, but no work is shorter than calibrated."""
    for step, simulated in zip(metrics(exact[0]), simulate(exact[0]), strict=True):
        assert step["timing_s/apply"] == pytest.approx(18.0, rel=1e-3)
        assert step["step_time"] > 0.8 * simulated.step_s
        assert step["completions/max_length"] == 4096


@pytest.mark.wide
def test_engines_decode_ahead_as_simulated_ones_do(tmp_path: Path, exact: tuple[Path, str]) -> None:
    config = job(tmp_path)
    write_devices(tmp_path / "devices.yaml", ahead={"tokens": 2.0})
    folder, _ = train(config)
    assert journal.replay(folder / "journal.jsonl", from_journal).differences == []
    plain, ahead = simulate(exact[0]), simulate(folder)
    for line, before, after in zip(metrics(folder), plain, ahead, strict=True):
        assert line["speculation/drafted"] > line["speculation/accepted"] > 0
        assert line["speculation/tokens_per_verification"] == pytest.approx(2.0, abs=0.1)
        assert after.kept_tokens == before.kept_tokens
        assert after.rollout_s < 0.8 * before.rollout_s
        assert line["timing_s/rollout"] > 0.8 * after.rollout_s
    assert not any(line["speculation/drafted"] for line in metrics(exact[0]))


def test_nothing_looks_real(exact: tuple[Path, str]) -> None:
    folder, said = exact
    learned = ("reward", "loss", "grad_norm", "learning_rate")
    for step in metrics(folder):
        assert step["emulated"] == 1.0
        assert not [name for name in step if name.startswith(learned)]
    run = load_run(folder)
    assert run.samples["reward"].null_count() == run.samples.height
    assert "EMULATED, 8 devices, factor 2000, nothing is trained" in said
    assert "driver utilisation" in said
    assert "learning_rate" not in said
    assert "EMULATED run report" in (folder / "report.html").read_text()
    assert not list(folder.glob("checkpoint-*"))
    summary = json.loads((folder / "summary.json").read_text())["emulated"]
    assert summary["factor"] == 2000.0
    kept_up = summary["driver_utilisation"] <= 0.6 and summary["lateness_share"] <= 0.02
    assert summary["honest"] == kept_up


def test_nobody_takes_its_times_for_measured(exact: tuple[Path, str]) -> None:
    with pytest.raises(ValueError, match="an emulated run"):
        read_run(exact[0])


def test_doctor_says_that_nothing_is_held(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="emulated devices hold nothing"):
        look(job(tmp_path), None, 1)
    assert look(job(tmp_path), "H100", 8).needs is not None


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["off", "race", "prompts", "auto"])
@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"devices__layout": "separate", "devices__training": 4},
        {"engine": {"kind": "mini"}, "trainer": {"kind": "local"}},
    ],
    ids=["colocated", "separate", "together"],
)
def test_every_mode_ends(tmp_path: Path, mode: str, layout: dict) -> None:
    """Every prompt is kept once, or waits for a long round."""
    changes = dict(layout)
    if "engine" in changes:  # one device holds no 14B model, but one of 7B
        devices = tmp_path / "small.yaml"
        devices.write_text("{calibration: paper-7b-8k, workload: paper-8k, processes: 2}")
        changes |= {"devices__emulate": str(devices)}
    folder, _ = train(job(tmp_path, mode, **changes))
    kept = load_run(folder).samples.filter(state="kept")
    groups = kept.group_by("step", "prompt").len()
    assert set(groups["len"]) == {4}
    assert groups["prompt"].is_unique().all()
    assert groups.height == 24


@pytest.mark.slow
def test_what_emulated_devices_cannot_do_is_refused(tmp_path: Path) -> None:
    for changes, word in (
        ({"eval": {"fraction": 0.5}}, "eval"),
        ({"deterministic": True, "engine": {"kind": "mini"}}, "deterministic"),
        ({"model__path": str(write_model(tmp_path / "tiny", words=50))}, "50 tokens"),
        ({"trainer": {"kind": "local"}, "devices__per_node": 7}, "7"),
    ):
        with pytest.raises(ValueError, match=word) as refused:
            train(job(tmp_path, **changes))
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", calibration.builtin())
def test_the_papers_jobs_have_its_sizes(name: str, tmp_path: Path) -> None:
    paper = Paper(calibration=name, workload="paper-8k", gpus=32, factor=50.0)
    made = paper_job(paper, "exact", tmp_path, {"rollout": {"prompts_per_step": 6}})
    costs = calibration.load(name)
    written, meant = find_model(made.model.path), costs.shape
    assert replace(written, name=meant.name, context=meant.context) == meant
    assert made.rollout.prompts_per_step == 6
    assert made.rollout.num_generations == costs.responses
    assert made.devices.per_node == 32
