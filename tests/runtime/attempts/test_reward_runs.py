"""Reward functions in whole runs: what only fails, what is missing, what they log."""

import json
from pathlib import Path
from typing import Any

import pytest
from runtime_jobs import Workshop, metrics, run, table

pytestmark = pytest.mark.wide

MORE = """
def hangs(completions, **_):
    time.sleep(1000)

def logs(completions, trainer_state, log_extra, log_metric, answer, prompts, **_):
    log_extra("upper", [text[:3].upper() for text in completions])
    log_metric("answers", float(answer[0]))
    log_metric("reward", 7.0)
    assert trainer_state.max_steps == 3
    with open(prompts and __file__ + ".steps", "a") as file:
        file.write(f"{trainer_state.global_step} {trainer_state.epoch}\\n")
    return [None if int(prompts[0]) == 2 else float("nan") if int(prompts[0]) == 3 else 1.0]

def verl(data_source, solution_str, ground_truth, extra_info):
    assert extra_info["num_turns"] == 2
    return {"score": 0.5, "acc": ground_truth == "1", "pred": solution_str[:1]}

def wants(completions, anser):
    return [1.0]
"""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    made = Workshop(tmp_path_factory.mktemp("rewards"), rows=12)
    made.rewards.write_text(made.rewards.read_text() + MORE)
    return made


def rewards(shop: Workshop, *names: str, **settings: Any) -> list[dict[str, Any]]:
    """The first one with ``settings``; what hangs is given up soon."""
    hangs = {"timeout_s": 0.1} if names[0] == "hangs" else {}
    first = {"function": f"{shop.rewards}:{names[0]}"} | hangs | settings
    return [first, *({"function": f"{shop.rewards}:{name}"} for name in names[1:])]


@pytest.mark.parametrize(
    "mode", ["race", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("off", "exact"))]
)
def test_a_reward_that_hangs_ends_the_run(shop: Workshop, mode: str) -> None:
    """Not after every response has timed out, several times: that is 12 * 3 * 2 * 3 calls."""
    config = shop.config(f"hangs-{mode}", mode, devices__per_node=1, rewards=rewards(shop, "hangs"))
    with pytest.raises(ValueError, match="reward 'hangs' timed out 3 of 3: "):
        run(config)


def test_a_reward_that_hangs_can_be_skipped(shop: Workshop) -> None:
    config = shop.config(
        "skipped",
        epochs=1,
        devices__per_node=1,
        rewards=rewards(shop, "hangs", "ones", on_error="skip"),
    )
    folder, said = run(config)
    assert "WARNING reward 'hangs' timed out 3 of 3" in said
    rows = metrics(folder)
    assert len(rows) == 3
    assert all("rewards/hangs/mean" not in row and "rewards/ones/mean" in row for row in rows)
    assert json.loads((folder / "summary.json").read_text())["prompts_trained"] == 12


def test_an_evaluation_ends_with_a_reward_that_hangs(shop: Workshop) -> None:
    held_out = {"data": {"path": str(shop.data)}, "num_generations": 1}
    config = shop.config(
        "held-out", devices__per_node=1, rewards=rewards(shop, "hangs"), eval=held_out
    )
    with pytest.raises(ValueError, match="reward 'hangs' timed out 3 of 3"):
        run(config)


def test_what_functions_log_is_in_the_metrics(shop: Workshop) -> None:
    config = shop.config(
        "logged", epochs=1, devices__per_node=1, rewards=rewards(shop, "logs", "verl")
    )
    folder, said = run(config)
    rows = metrics(folder)
    assert [row["answers"] for row in rows] == [1.0] * 3
    assert [row["reward_extra/acc/mean"] for row in rows] == [1.0] * 3
    assert [row["rewards/logs/mean"] for row in rows] == [1.0] * 3
    # A name of the run's own is not taken away from it.
    assert all(row["reward"] <= 1.5 for row in rows)
    assert said.count("logs the metric 'reward', a name of the run's own") == 1
    found = table(folder)
    assert found.filter(found["completion"].str.head(1) != found["extra/pred"]).is_empty()
    upper = found["completion"].str.head(3).str.to_uppercase()
    assert found.filter(upper != found["extra/upper"]).is_empty()
    assert set(found["rewards/verl"]) == {0.5}
    none = found.filter(found["rewards/logs"].is_null())
    assert set(none["prompt"]) == {"p2", "p3"}
    steps = Path(f"{shop.rewards}.steps").read_text().split("\n")[:-1]
    progress = [line.split() for line in steps]
    assert {int(step) for step, _ in progress} == {0, 1, 2}
    assert {round(float(epoch), 3) for step, epoch in progress if step == "1"} == {0.333}


def test_a_parameter_that_nobody_gives_is_found_before_the_model_is_loaded(
    shop: Workshop, tmp_path: Path
) -> None:
    """The model's weights are damaged, which would be said first."""
    other = Workshop(tmp_path)
    weights = other.model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    config = shop.config("wants", model__path=str(other.model), rewards=rewards(shop, "wants"))
    with pytest.raises(ValueError, match="did you mean") as caught:
        run(config)
    assert str(caught.value) == (
        f"rewards: '{shop.rewards}:wants' needs 'anser', which is neither a column of the rows "
        "(answer, id) nor an option: did you mean 'answer'?"
    )
