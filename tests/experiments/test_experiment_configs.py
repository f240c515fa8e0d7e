"""Every arm of every experiment is a valid configuration, on a CPU and on GPUs."""

from pathlib import Path

import pytest
from cpu_runs import experiments
from cpu_tables import VIEWS
from make_docs import HEAD, PAGE, REAL, REAL_HEAD, overview, sides

from rollpacker.config import ConfigError, load
from rollpacker.job.plan.checks import check
from rollpacker.sim import reproduce
from rollpacker.sim.costs import calibration

ROOT = Path(__file__).parents[2] / "experiments"
KNOWN = experiments()
RUNS = {name: one for name, one in KNOWN.items() if one.arms}
GPU = sorted(ROOT.glob("*/gpu*.yaml"))
SETTINGS = {"gpu": "8k", "gpu-14b-16k": "16k", "gpu-32b-32k": "32k"}


def test_the_artifacts_experiments_are_all_there() -> None:
    assert set(KNOWN) == {"fig8", "fig9", "fig10", "fig11", "fig13", "table3"} == set(VIEWS)
    assert all(one.runs in RUNS for one in KNOWN.values() if not one.arms)
    assert {path.parent.name for path in GPU} == set(RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_every_cpu_arm_is_valid(name: str) -> None:
    path = ROOT / name / "cpu.yaml"
    resolved = [load(path, [*arm.set, *arm.cpu]) for arm in RUNS[name].arms.values()]
    for config in resolved:
        check(config)
        assert config.devices.kind == "cpu"
    assert len({config.model_dump_json() for config in resolved}) == len(resolved)


@pytest.mark.parametrize("path", GPU, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_gpu_arm_is_valid_and_of_the_papers_size(path: Path) -> None:
    costs = calibration.load(reproduce.SETTINGS[SETTINGS[path.stem]][0])
    for arm in RUNS[path.parent.name].arms.values():
        config = load(path, arm.set)
        check(config)
        assert config.devices.kind == "cuda"
        assert config.model.path == f"Qwen/{costs.model}"
        assert config.rollout.max_completion_length == costs.response_cap
        assert config.rollout.prompts_per_step == costs.prompts
        assert config.rollout.num_generations == costs.responses


def test_an_unknown_key_of_an_arm_would_be_refused() -> None:
    with pytest.raises(ConfigError, match="tail_batching"):
        load(GPU[0], ["rollout.tail_batchin.mode=race"])


def test_over_provisioning_is_that_of_the_simulated_bars() -> None:
    for name, arm in RUNS["fig11"].arms.items():
        tail = load(ROOT / "fig11" / "cpu.yaml", arm.set).rollout.tail_batching
        if name == "none":
            assert tail.mode == "off"
        else:
            assert (tail.eta_prompts, tail.eta_responses) == reproduce.FIG11_ETAS[name]
    assert list(RUNS["fig11"].arms) == list(reproduce.FIG11_ETAS)


def test_the_artifacts_fixed_share_is_there() -> None:
    arm = RUNS["table3"].arms["fixed 40%"]
    rollout = load(ROOT / "table3" / "gpu.yaml", arm.set).rollout
    assert rollout.tail_batching.mode == "exact"
    assert (rollout.streaming.scaling, rollout.streaming.scaling_fraction) == ("fixed", 0.4)


def test_the_pages_say_what_their_generator_says() -> None:
    """After a change of these texts: ``python experiments/make_docs.py --sides``."""
    page = PAGE.read_text(encoding="utf-8")
    assert page.startswith(HEAD)
    assert REAL + "\n".join([REAL_HEAD, *overview(KNOWN)]) in page
    for name, experiment in KNOWN.items():
        readme = (ROOT / name / "README.md").read_text(encoding="utf-8")
        assert readme.endswith(REAL + "\n".join(["", *sides(experiment), ""]))
        assert (ROOT / name / "cpu.md").exists()
