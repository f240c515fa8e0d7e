"""Every arm of every experiment is a valid configuration, on a CPU and on GPUs; its command and its
pages."""

import subprocess
import sys
from pathlib import Path

import pytest
from figures import HEAD, PAGE, VIEWS, experiments, main, sides

from rollpacker.config import load
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


def test_arms_are_those_of_the_artifact_and_of_the_simulated_bars() -> None:
    for name, arm in RUNS["fig11"].arms.items():
        tail = load(ROOT / "fig11" / "cpu.yaml", arm.set).rollout.tail_batching
        found = None if tail.mode == "off" else (tail.eta_prompts, tail.eta_responses)
        assert found == (None if name == "none" else reproduce.FIG11_ETAS[name])
    assert list(RUNS["fig11"].arms) == list(reproduce.FIG11_ETAS)
    arm = RUNS["table3"].arms["fixed 40%"]
    rollout = load(ROOT / "table3" / "gpu.yaml", arm.set).rollout
    assert rollout.tail_batching.mode == "exact"
    assert (rollout.streaming.scaling, rollout.streaming.scaling_fraction) == ("fixed", 0.4)


def test_the_pages_say_what_their_generator_says() -> None:
    """After a change of these texts: ``python experiments/figures.py pages``."""
    assert PAGE.read_text(encoding="utf-8").startswith(HEAD)
    for path, text in sides(KNOWN).items():
        assert path.read_text(encoding="utf-8") == text, path
    assert all((ROOT / name / "cpu.md").exists() for name in KNOWN)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fig99"], "no runs of fig99: choose from fig9, fig11, fig13, table3"),
        (["table3", "--arm", "fixed 41%"], "table3 has no arm 'fixed 41%': none, fixed 20%"),
    ],
)
def test_a_mistake_is_refused_before_any_work(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["figures.py", "cpu", *words, "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as left:
        main()
    assert said in f"{left.value.code}{capsys.readouterr().err}"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_figure_from_its_command_to_its_page(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "figures.py"), "cpu", "table3", "--repeats", "1"]
    command += ["--arm", "none", "--arm", "fixed 40%", "--out", str(tmp_path)]
    command += ["--pages", str(tmp_path / "pages")]
    small = ("steps=2", "data.options.size=40", "rollout.max_completion_length=80")
    done = subprocess.run([*command, *small], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    page = (tmp_path / "pages" / "table3" / "cpu.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    assert rows == ["", "---", "none", "fixed 40%"]
    folders = sorted(path.name for path in (tmp_path / "table3").iterdir())
    assert folders == ["0-fixed-40-", "0-none"]
    assert page.splitlines()[4] in done.stdout
