"""What fails inside verl: rewards, servers, workers, and settings that rounds do not know."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import ray_here
from verl_jobs import P0, PROMPTS, R0, Stubbed, config, run, write_inputs

from case_files import read_table
from rollpacker.core.journal import replay
from rollpacker.policy.rollout import from_journal
from rollpacker.verl import host

pytestmark = [pytest.mark.verl, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_here.started():
        yield


class Dying(Stubbed):
    """One of its workers dies in the second step."""

    def on_sample_begin(self) -> None:
        if self.global_steps == 2:
            ray.kill(self.agent_loop_manager.agent_loop_workers[0])
        super().on_sample_begin()


def test_failures_of_servers_and_rewards_are_tried_again_then_given_up(
    cluster: None, tmp_path: Path
) -> None:
    write_inputs(tmp_path, answers={5: "boom"})
    ran = run(
        tmp_path,
        "+rollpacker.tail_batching.mode=exact",
        "trainer.total_epochs=1",
        "+actor_rollout_ref.rollout.engine_kwargs.stub.fails_every=9",
    )
    assert Counter(request.outcome for request in ran.requests)["failed"] > 0
    trained = Counter(uid for step in ran.steps for uid in step)
    whole = [uid for uid, count in trained.items() if count == R0 and not uid.startswith("pad")]
    # One prompt has no reward: its step goes on without it, padded by verl to a whole batch.
    assert len(whole) == PROMPTS - 1
    assert sorted(len(set(step) & set(whole)) for step in ran.steps) == [P0 - 1, P0, P0, P0]
    assert set(ran.left) == {0}
    assert ran.inflight == 0
    assert replay(ran.journal, from_journal).differences == []


def test_a_worker_that_dies_ends_the_run(cluster: None, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    with pytest.raises(Exception, match=r"(?i)actor|died|killed"):
        run(tmp_path, kind=Dying)


def test_validation_is_verl_s_and_a_checkpoint_of_its_own_trainer_is_refused(
    cluster: None, tmp_path: Path
) -> None:
    write_inputs(tmp_path)
    ran = run(
        tmp_path, "trainer.save_freq=1", "trainer.test_freq=1", "trainer.total_training_steps=1"
    )
    assert ran.metrics[0]["val-core/numbers/acc/mean@1"] >= 0.0
    assert ran.alive == 0
    (tmp_path / "checkpoints" / "global_step_1" / "rollpacker.pt").unlink()
    with pytest.raises(ValueError, match="made without trainer"):
        run(tmp_path)


@pytest.mark.parametrize(
    ("override", "said"), read_table(__file__, "test_what_is_not_supported_is_refused_in_one_line")
)
def test_what_is_not_supported_is_refused_in_one_line(
    tmp_path: Path, override: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        Stubbed(config(tmp_path, override))
    assert "\n" not in str(raised.value)


def test_verl_loads_the_trainer_by_name() -> None:
    code = (
        "from verl.trainer.ppo.v1 import get_trainer_cls; "
        "from verl.utils.import_utils import load_class_from_fqn as load; "
        "print(get_trainer_cls('rollpacker').__module__, "
        "load('rollpacker.verl.AgentLoopManager', 'AgentLoopManager').__module__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"VERL_USE_EXTERNAL_MODULES": "rollpacker.verl"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[-2:] == ["rollpacker.verl.trainer", "rollpacker.verl.manager"]


def test_another_release_is_refused_by_what_has_changed() -> None:
    class Worker:
        def _run_prompt(self, prompt: Any, how: Any) -> None: ...

    seams = {(Worker, "_run_prompt"): ("prompt trace",), (Worker, "_compute_score"): ("outputs",)}
    changed = host.changes(seams)
    assert changed == [
        "Worker._run_prompt(prompt, how) has other parameters",
        "Worker has no _compute_score",
    ]
    with pytest.raises(ImportError, match="has no _compute_score"):
        host.check_release(host.TESTED[0], changed)
    with pytest.raises(ImportError, match="not with"):
        host.check_release("0.8.0", [])
    host.check_release(host.TESTED[0], [])
