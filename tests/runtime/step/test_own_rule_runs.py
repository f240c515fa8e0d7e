"""The rule of docs/own_policy.md: in the simulator, in a run, over a resume, and refused."""

import re
from collections import Counter
from pathlib import Path

import pytest
from runtime_jobs import Workshop, cli_here, run, table, times_trained, weights_digest

from rollpacker import config
from rollpacker.core import journal
from rollpacker.policy.rollout import from_journal

PAGE = (Path(__file__).parents[3] / "docs" / "own_policy.md").read_text(encoding="utf-8")
ROWS = 48
shop = Workshop.fixture(rows=ROWS)


@pytest.fixture(scope="module")
def mode(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page's rule, which predicts from 20 responses and stops at their median."""
    found = re.search(r"^```python title=\"quantile.py\"\n(.*?)^```$", PAGE, re.M | re.S)
    assert found is not None
    code = found[1].replace("0.98", "0.5").replace("< 100", "< 20")
    file = tmp_path_factory.mktemp("own") / "quantile.py"
    file.write_text(code, encoding="utf-8")
    return f"{file}:StopAtQuantile"


def rounds(path: Path) -> tuple[Counter[str], int]:
    """Rounds by kind, and how many of the short ones had fewer groups than they were to have."""
    kinds: Counter[str] = Counter()
    early: set[int] = set()
    for _, line in journal.read(path):
        for made in line.get("decisions", ()):
            kinds.update([made["round"]] if made["kind"] == "BeginRound" else [])
            early |= {kinds.total()} if made["kind"] == "DeferPrompt" else set()
    return kinds, len(early)


def test_a_run_ends_rounds_early_loses_no_prompt_and_replays(shop: Workshop, mode: str) -> None:
    folder, _ = run(shop.config("own", mode, deterministic=True))
    kinds, early = rounds(folder / "journal.jsonl")
    assert kinds["full"] >= 1
    assert kinds["short"] >= 5
    assert kinds["long"] >= 1
    assert early >= 3
    trained = times_trained(folder)
    assert len(trained) == ROWS
    assert set(trained.values()) == {2}
    assert "aborted" in set(table(folder)["state"])
    found = journal.replay(folder / "journal.jsonl", from_journal)
    assert found.events > 100
    assert found.differences == []


def test_a_resumed_run_ends_with_the_same_weights(shop: Workshop, mode: str) -> None:
    changes = {"deterministic": True, "checkpoint": {"every": 1, "keep": 40}}
    whole, _ = run(shop.config("whole", mode, **changes))
    run(shop.config("parts", mode, **changes, steps=9))
    parts, _ = run(shop.config("parts", mode, **changes), resume=True)
    assert times_trained(parts) == times_trained(whole)
    assert weights_digest(parts) == weights_digest(whole)


def test_a_simulation_stops_at_the_quantile(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "own.jsonl"
    words = (f"rollout.tail_batching.mode={mode}", "steps=8", "rollout.prompts_per_step=16")
    example = Path(__file__).parents[3] / "examples" / "simulate" / "paper-7b-8k.yaml"
    done = cli_here("simulate", example, *words, "--journal", path)
    assert done.returncode == 0, done.stderr
    kinds, early = rounds(path)
    assert kinds["full"] == 1
    assert kinds["short"] >= 3
    assert early >= 2
    assert ", 0 differences" in cli_here("journal", "replay", path).stdout

    rule, _, name = mode.rpartition(":")
    changed = tmp_path / "changed.py"
    changed.write_text(Path(rule).read_text("utf-8").replace("0.5", "0.1"), encoding="utf-8")
    path.write_text(path.read_text("utf-8").replace(mode, f"{changed}:{name}"), encoding="utf-8")
    done = cli_here("journal", "replay", path)
    assert done.returncode == 1
    _, cause, *shown, stopped = done.stdout.splitlines()
    assert re.match(r"line \d+: the policy decides otherwise than the journal says: ", cause)
    assert f"did the rule's file {changed} change, or does it use a clock?" in cause
    assert re.match(r"line \d+: the replay stopped at an event .*Error: ", stopped)
    assert len(shown) == 3
    assert all("the journal has " in line and len(line) < 400 for line in shown)


def test_mistakes_are_named(tmp_path: Path, shop: Workshop, mode: str) -> None:
    (tmp_path / "other.py").write_text("class Other:\n    pass\n", encoding="utf-8")
    cases = {
        "exat": "did you mean 'exact'",
        f"{mode}s": "did you mean 'StopAtQuantile'",
        f"{tmp_path}/none.py:Name": "there is no file",
        f"{tmp_path}/other.py:Other": "a subclass of rollpacker.policy.rounds.rule.TailRule",
    }
    for wrong, said in cases.items():
        with pytest.raises(ValueError, match=r"rollout\.tail_batching\.mode") as error:
            run(shop.config("wrong", wrong))
        assert said in str(error.value)


def test_rewards_of_whole_groups_refuse_it_and_off_stays_off(shop: Workshop, mode: str) -> None:
    compared = [{"function": f"{shop.rewards}:ones", "needs_group": True}]
    with pytest.raises(ValueError, match="compares all responses of a prompt"):
        run(shop.config("group", mode, rewards=compared))
    assert config.parse(shop.tree("off", False)).rollout.tail_batching.mode == "off"
