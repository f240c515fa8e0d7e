"""``doctor --run``: each part of a job is tried, and what is broken is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runtime_jobs import Workshop
from typer.testing import CliRunner

from rollpacker.cli import app
from rollpacker.config import RunConfig
from rollpacker.engine.base import Speculation
from rollpacker.engine.configured import build_engine
from rollpacker.job.ask import doctor
from rollpacker.job.ask.doctor import EngineTrial
from rollpacker.runtime.cluster.machine_checks import Check

GOOD = dict.fromkeys(EngineTrial.STEPS, True)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return Workshop(tmp_path_factory.mktemp("trial"), rows=8).config("tried", steps=3)


def verdicts(config: RunConfig, build: Any = build_engine) -> dict[str, bool | None]:
    return {each.step: each.ok for each in EngineTrial(config, build).findings()}


def test_a_good_machine(config: RunConfig) -> None:
    assert verdicts(config) == GOOD


class Broken:
    """An engine of which one part does not do what it should."""

    def __init__(self, part: str, engine: Any) -> None:
        self._part = part
        self._engine = engine
        self._first: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def wake(self) -> None:
        if self._part == "sleep":
            raise RuntimeError("CUDA error: out of memory")
        self._engine.wake()

    def speculate(self, how: Speculation) -> None:
        if self._part != "drafts":
            self._engine.speculate(how)

    def step(self) -> Any:
        found = self._engine.step()
        if self._part == "log-probabilities":
            for output in found:
                output.logprobs[:] -= 0.2
        if self._part == "weights":  # as if none had come since
            found = [self._first.setdefault(output.attempt, output) for output in found]
        return found


@pytest.mark.parametrize("part", ["weights", "log-probabilities", "sleep", "drafts"])
def test_what_is_broken_is_named(config: RunConfig, part: str) -> None:
    found = verdicts(config, lambda *given, **more: Broken(part, build_engine(*given, **more)))
    # Drafts are of the engine's own responses; nothing can follow a sleep without end.
    after = {"weights": {"drafts": False}, "sleep": {"drafts": None, "rates": None}}
    assert found == GOOD | {part: False} | after.get(part, {})


def test_an_engine_that_does_not_start_ends_it(config: RunConfig) -> None:
    def build(*_given: Any, **_more: Any) -> Any:
        raise ValueError("engine.kind=vllm cannot run it here: could not find nvcc")

    findings = [*EngineTrial(config, build).findings()]
    assert [each.ok for each in findings] == [True, False, *[None] * 5]
    assert "nvcc" in findings[1].detail


def test_a_driver_without_a_device_is_named(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = Check(name="devices", ok=False, detail="torch cannot use it", fix="update the driver")
    monkeypatch.setattr(doctor, "devices", lambda: lacking)
    findings = [*EngineTrial(config).findings()]
    assert [each.ok for each in findings] == [False, *[None] * 6]
    assert "update the driver" in findings[0].detail


def hang(_config: RunConfig, _answer: Any) -> None:
    import time

    time.sleep(600)


def die(_config: RunConfig, _answer: Any) -> None:
    import os

    os._exit(7)


@pytest.mark.parametrize(("part", "said"), [(hang, "no answer within 0.5 s"), (die, "status 7")])
def test_a_part_that_hangs_or_dies_is_named(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, part: Any, said: str
) -> None:
    monkeypatch.setattr(doctor, "_USUAL_S", 0.5 if part is hang else 60.0)
    first, second = doctor._apart(part, config, ("one", "two"))
    assert (first.ok, second.ok) == (False, None)
    assert said in first.detail


def test_the_command_writes_a_file_and_its_status_tells(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = tmp_path / "job.yaml"
    job.write_text(json.dumps(config.model_dump(mode="json")), encoding="utf-8")
    done = CliRunner().invoke(app, ["doctor", str(job), "--run"])
    assert done.exit_code == 0, done.output
    steps = json.loads((tmp_path / "rollpacker-doctor.json").read_text(encoding="utf-8"))["steps"]
    assert [each["step"] for each in steps] == [*EngineTrial.STEPS, "step"]
    assert all(each["ok"] for each in steps)
    assert steps[-1]["facts"]["step_time"] > 0
