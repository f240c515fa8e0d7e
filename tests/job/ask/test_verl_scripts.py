"""verl's published scripts for models of 7 to 8 and 32 billion weights, by their keys: each becomes
a job that fits on 8 or 16 H100s, and what is changed for that changes nothing that is learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollpacker import config
from rollpacker.cli.convert import CommandLine, translate
from rollpacker.job.ask.doctor import MemoryFit, look
from rollpacker.job.plan.checks import check
from rollpacker.sim.memory.settings import with_changes

ROWS = Path(__file__).with_name("verl_scripts.jsonl").read_text(encoding="utf-8").splitlines()
SCRIPTS: dict[str, dict[str, Any]] = {row["name"]: row["keys"] for row in map(json.loads, ROWS)}
SAME = {
    *("train.micro_batch_tokens", "train.gradient_checkpointing", "trainer.kind", "trainer.shard"),
    *("engine.gpu_memory", "engine.tensor_parallel", "devices.layout", "devices.training"),
    *("devices.nodes", "devices.per_node", "cluster.address"),
}
"""Keys with which the same is learned."""
ESTIMATOR, RESPONSES = "algorithm.adv_estimator", "actor_rollout_ref.rollout.n"


def translated(tmp_path: Path, keys: dict[str, Any]) -> config.RunConfig:
    file = tmp_path / "run.sh"
    words = " \\\n    ".join(f"{key}={value}" for key, value in keys.items())
    file.write_text(f"set -x\npython3 -m verl.trainer.main_ppo \\\n    {words} $@\n")
    out = tmp_path / "job.yaml"
    out.write_text(translate(file, CommandLine()).text)
    run = config.load(out)
    check(run)
    return run


def fitted(run: config.RunConfig) -> MemoryFit:
    """On at most two machines, after what was proposed."""
    if run.devices.nodes > 2:
        run = with_changes(run, {"devices.nodes": 2, "trainer.shard": 0})
    found = look(run, "H100", 8)
    if found.fits:
        return found
    assert found.changes is not None
    assert found.changed is not None
    assert set(found.changes) <= SAME
    changed = with_changes(run, found.changes)
    check(changed)
    again = look(changed, "H100", 8)
    assert again.needs == found.changed
    return again


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_ends_with_a_job_that_fits(tmp_path: Path, name: str) -> None:
    keys = SCRIPTS[name]
    if keys[ESTIMATOR] == "gae":
        with pytest.raises(ValueError, match=r"trains a critic.* set .*=grpo and .*=8"):
            translated(tmp_path, keys)
        keys = keys | {ESTIMATOR: "grpo", RESPONSES: 8}
    found = fitted(translated(tmp_path, keys))
    assert found.fits
    machine = found.needs.machine
    assert (machine.nodes, machine.devices) in ((1, 8), (2, 8))


def test_a_job_of_seven_billion_weights_fits_as_it_is_translated(tmp_path: Path) -> None:
    run = translated(tmp_path, SCRIPTS["grpo_qwen2-7b_math"])
    assert run.train.micro_batch_tokens == 16384
    found = look(run, "H100", 8)
    assert found.fits
    assert not found.needs.tight
    # Of the job with the worst case it is the first key that is proposed, and the only one.
    found = look(with_changes(run, {"train.micro_batch_tokens": 147456}), "H100", 8)
    assert found.changes == {"train.micro_batch_tokens": 65536}


def test_thirty_two_billion_weights_on_the_machines_that_verl_takes(tmp_path: Path) -> None:
    run = translated(tmp_path, SCRIPTS["dapo_qwen2.5_32b"])
    assert (run.devices.nodes, run.rollout.dynamic_sampling.max_draws) == (16, 29)
    found = look(run, "H100", 8)
    assert found.needs.machine.workers == found.needs.division.replica == 128
