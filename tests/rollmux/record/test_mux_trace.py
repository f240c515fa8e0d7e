"""Synthetic traces and trace files."""

import json
from pathlib import Path

import numpy as np
import pytest

from rollpacker.core.codec import plain
from rollpacker.rollmux.model.jobs import JobSpec, Observed, host_memory_gb
from rollpacker.rollmux.record import trace as traces


def write(path: Path, jobs: list[traces.TraceJob]) -> None:
    path.write_text("".join(json.dumps(job.to_json()) + "\n" for job in jobs), encoding="utf-8")


def test_a_trace_is_its_seed_and_survives_a_file(tmp_path: Path) -> None:
    config = traces.Philly(jobs=20, days=2, nodes="mixed", mean_hours=2.0)
    jobs = traces.philly(config, np.random.default_rng(3))
    again = traces.philly(config, np.random.default_rng(3))
    write(tmp_path / "t.jsonl", jobs)
    read = traces.read(tmp_path / "t.jsonl")
    for a, b, c in zip(jobs, again, read, strict=True):
        assert a.spec == b.spec == c.spec
        assert a.arrival_s == c.arrival_s
        assert (a.rollout_s == c.rollout_s).all()
        assert (a.train_s == b.train_s).all()


def test_the_synthetic_trace_keeps_what_it_says() -> None:
    config = traces.Philly(jobs=300, slo=(1.2, 1.5), nodes="mixed", mean_hours=3.0)
    jobs = traces.philly(config, np.random.default_rng(0))
    assert [job.arrival_s for job in jobs] == sorted(job.arrival_s for job in jobs)
    assert jobs[-1].arrival_s < 14 * 86400
    assert {job.spec.train_nodes for job in jobs} == {1, 2, 4}
    for job in jobs:
        assert 1.2 <= job.spec.slo <= 1.5
        assert job.rollout_s.max() <= job.spec.worst_rollout_s
        assert job.train_s.max() <= job.spec.worst_train_s
        assert len(job.rollout_s) == job.spec.iterations
        assert 95 < job.spec.worst_rollout_s + job.spec.worst_train_s < 905


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"slo": 0.5}, "slo: must be float >= 1.0, got 0.5"),
        ({"rollout_s": [1.0]}, "equally long"),
        ({"train_s": [1.0, -1.0]}, "positive seconds"),
        ({"colour": "red"}, "unknown key 'colour'"),
        ({"id": ""}, "id: must be str of length >= 1"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, change: dict[str, object], what: str) -> None:
    good = {
        "id": "a",
        "arrival_s": 0.0,
        "worst_rollout_s": 3.0,
        "worst_train_s": 2.0,
        "rollout_s": [2.0, 2.0],
        "train_s": [1.0, 1.0],
    }
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(good) + "\n" + json.dumps(good | {"id": "b"} | change) + "\n")
    with pytest.raises(ValueError, match="line 2: .*" + what):
        traces.read(path)


def test_files_without_jobs_and_with_twins_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="no jobs"):
        traces.read(path)
    jobs = traces.philly(traces.Philly(jobs=1, mean_hours=0.5), np.random.default_rng(0))
    write(path, [*jobs, *jobs])
    with pytest.raises(ValueError, match="same id"):
        traces.read(path)


def test_a_job_is_known_after_five_iterations_and_remembers_sixty() -> None:
    seen = Observed()
    for number in range(100):
        assert seen.known == (number >= 5)
        seen.add(float(number), 1.0)
    assert len(seen.ring) == 60
    assert seen.means == (69.5, 1.0)


def test_host_memory_follows_the_model() -> None:
    assert host_memory_gb(32.0, tensor_parallel=4, train_nodes=2) == (228.0, 388.0)


def test_specifications_are_checked() -> None:
    spec = JobSpec(id="a", worst_rollout_s=2.0, worst_train_s=1.0)
    assert JobSpec.from_json(plain(spec)) == spec
    with pytest.raises(ValueError, match=r"job a: worst_rollout_s: must be float >= 0.001, got 0"):
        JobSpec.from_json(plain(spec) | {"worst_rollout_s": 0.0})
