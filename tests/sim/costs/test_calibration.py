"""Calibration files: what is built in, and mistakes in one's own."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rollpacker.config import RolloutConfig, StreamingConfig
from rollpacker.policy.engines.hardware import Hardware
from rollpacker.sim.costs import calibration
from rollpacker.sim.costs.calibration import Calibration
from rollpacker.sim.costs.costs import CurveCosts, GpuCosts
from rollpacker.sim.costs.hardware import MeasuredDevice
from rollpacker.sim.world.machines import SimulationConfig, machine_of

CPU: dict[str, Any] = {
    "name": "mine",
    "device": "cpu",
    "model": "Qwen2.5-7B",
    "gpus": 2,
    "response_cap": 128,
    "measured": {
        "latency": {1: 0.001, 8: 0.004},
        "kv_tokens": 4096,
        "prefill_token_s": 1e-5,
        "train_token_s": 1e-4,
    },
    "fitted": {"measured": "journal of a run"},
}
PAPER = ("paper-7b-8k", "paper-14b-16k", "paper-32b-32k")


def test_the_papers_settings() -> None:
    loaded = [calibration.load(name) for name in PAPER]
    assert calibration.builtin() == sorted(PAPER)
    assert [c.kappa for c in loaded] == [0.81, 0.92, 0.85]
    assert [c.train_launch_s for c in loaded] == [0.03, 0.064, 0.30]
    assert [c.train_mfu for c in loaded] == [0.45, 0.2, 0.2]
    assert [c.synchronous_reward_s for c in loaded] == [98.0, 44.0, 76.0]
    assert [c.weight_sync_s for c in loaded] == [5.0, 13.0, 23.0]
    assert [c.gpus for c in loaded] == [16, 32, 64]
    assert all((c.device, c.prompts, c.responses) == ("H800", 128, 8) for c in loaded)


@pytest.mark.parametrize("name", PAPER)
def test_every_fitted_value_says_to_what(name: str) -> None:
    loaded = calibration.load(name)
    plain = {"name", "device", "model", "gpus", "prompts", "responses", "response_cap"}
    plain |= {"prompt_tokens", "fitted"}
    assert loaded.model_fields_set - plain == set(loaded.fitted)


def test_costs_carry_the_calibration() -> None:
    loaded = calibration.load("paper-32b-32k")
    engine = loaded.engine()
    assert isinstance(engine, GpuCosts)
    assert (engine.tp, engine.kappa) == (2, 0.85)
    fast, slow = loaded.engine(tp=8), loaded.engine(tp=4)
    assert fast.step_s(1, 1000) < slow.step_s(1, 1000)
    assert loaded.training(gpus=16).sequence_s(1000) < loaded.training().sequence_s(1000)
    assert loaded.rewards.judged_s(1.0) == 42.0


def test_terms_of_the_step_can_be_measured() -> None:
    path = calibration.FOLDER / "paper-7b-8k.yaml"
    given = calibration.load(path).model_dump(exclude_unset=True)
    measured = Calibration.model_validate(given | {"efficiency": {"step_s": 1.5e-3}})
    faster = calibration.load(path).engine().step_s(1, 0) - measured.engine().step_s(1, 0)
    assert faster == pytest.approx(0.81 * 3e-3)


def test_a_cpu_calibration_survives_a_round_trip(tmp_path: Path) -> None:
    mine = Calibration.model_validate(CPU)
    calibration.dump(mine, tmp_path / "mine.yaml")
    assert calibration.load(tmp_path / "mine.yaml") == mine
    assert isinstance(mine.engine(), CurveCosts)
    assert mine.engine().step_s(8, 0) == 0.004
    assert mine.training().sequence_s(100) == pytest.approx(300 * 1e-4)
    assert mine.measured == MeasuredDevice.model_validate(CPU["measured"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kapa": 1.0}, "unknown key 'kapa'"),
        ({"efficiency": {"f": 1.0}}, "unknown key 'efficiency.f'"),
        ({"gpus": 0}, "'gpus': must be"),
        ({"measured": None}, "device 'cpu' and the section 'measured' go together"),
        ({"device": "H900", "measured": None}, "unknown device 'H900'"),
        ({"device": "H800", "measured": None, "gpus": 12}, "gpus=12: use 1 to 8, or a multiple"),
        ({"fitted": {"kapa": "x"}}, "fitted.kapa is not a key"),
        ({"rollout_tp": 3}, "gpus=2 is not a multiple of rollout_tp"),
        ({"device": "H800", "measured": None, "model": "x"}, "unknown model 'x'"),
        ({"device": "A100", "measured": None, "model": "Llama-3.1-70B"}, "runs on 4, 8 x A100"),
        ({"measured": {"latency": {}, "kv_tokens": 1, "prefill_token_s": 0}}, "latency curve"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(CPU | change))
    with pytest.raises(ValueError, match=r"mine\.yaml: ") as error:
        calibration.load(path)
    assert message.lower() in str(error.value).lower()
    assert "\n" not in str(error.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such calibration file; built in: paper-14b-16k"):
        calibration.load("paper-70b")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ValueError, match="expected keys and values, found list"):
        calibration.load(tmp_path / "list.yaml")
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(ValueError, match=r"empty.yaml: holds no keys$"):
        calibration.load(tmp_path / "empty.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ValueError, match="cannot be read as YAML"):
        calibration.load(tmp_path / "bad.yaml")
    (tmp_path / "short.yaml").write_text("name: x")
    with pytest.raises(ValueError, match="'device' is required"):
        calibration.load(tmp_path / "short.yaml")


def test_the_nearest_calibration_holds_the_longest_response() -> None:
    names = {100: "paper-7b-8k", 8192: "paper-7b-8k", 8193: "paper-14b-16k", 10**6: "paper-32b-32k"}
    assert {longest: calibration.nearest(longest).name for longest in names} == names


def machine(gpus: int, given: dict[str, Any] = CPU, **streaming: Any) -> Hardware | None:
    rollout = RolloutConfig(streaming=StreamingConfig(**streaming))
    job = SimulationConfig(calibration="", workload="", gpus=gpus, rollout=rollout)
    return machine_of(job, Calibration.model_validate(given))


def test_measured_devices_are_compared_as_in_a_run() -> None:
    asked = machine(4)
    assert asked is not None
    assert (asked.sizes, asked.node_size, asked.replica_devices) == ((1,), 4, 1)
    assert machine(1) is None
    assert machine(4, scaling="off") is None
    assert machine(4, scaling="paper") is not None
    paper = calibration.load("paper-7b-8k").model_dump(exclude_defaults=True)
    assert machine(64, paper) is not None
    assert machine(64, paper, scaling="off") is None
