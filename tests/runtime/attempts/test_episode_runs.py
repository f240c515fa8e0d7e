"""Runs in which an environment answers the model: every mode, exactly, resumed, measured."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from runtime_jobs import (
    Workshop,
    checkpoints,
    cli_here,
    kept_groups,
    metrics,
    run,
    table,
    times_trained,
    weights_digest,
    write_byte_model,
)
from transformers import AutoTokenizer

from rollpacker.runtime.attempts.attempts import EpisodeRecord

SUPPORT = Path(__file__).parents[1] / "support"
ECHO = {"kind": "python", "path": f"{SUPPORT / 'talking.py'}:Echo", "step_timeout_s": 60.0}
TALKING: dict[str, Any] = {
    "rewards": [],
    "environment": ECHO,
    "samples": {"token_ids": True},
    "rollout__max_completion_length": 120,
}


AGENT = """
import json, os, sys, urllib.request

def ask(messages, base_url, api_key):
    head = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    body = json.dumps({"messages": messages}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, head)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return json.load(opener.open(request))["choices"][0]["message"]

def solve(row, **client):
    messages = [{"role": "user", "content": f"You are asked {row['id']}"}]
    messages.append(ask(messages, **client))
    messages.append({"role": "user", "content": "Again"})
    return len(ask(messages, **client)["content"] or "") / 100

if __name__ == "__main__":
    client = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    known = {"word": float(os.environ["SHOP_WORD"]), "secrets": float("SHOP_KEY" in os.environ)}
    print(json.dumps({"reward": solve(json.loads(sys.stdin.readline()), **client)} | known))
"""


class Talkshop(Workshop):
    """Its model has a chat template."""

    def __init__(self, folder: Path, *, rows: int = 11) -> None:
        super().__init__(folder, rows=rows)
        self.model = write_byte_model(folder / "chat-model")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Talkshop:
    return Talkshop(tmp_path_factory.mktemp("episodes"))


@pytest.fixture(scope="module")
def exact(shop: Talkshop) -> tuple[Path, str]:
    changes = {"eval": {"data": {"path": str(shop.data)}}, "devices__per_node": 2}
    return run(shop.config("exact", "exact", **TALKING, **changes))


def responses(folder: Path, step: int = 0) -> dict[tuple[str, int], list[int]]:
    """Tokens of a step's kept responses."""
    kept = table(folder, "kept").filter(pl.col("step") == step)
    names = ["prompt", "sample_index", "completion_ids"]
    return {(prompt, index): list(ids) for prompt, index, ids in kept.select(names).rows()}


def test_a_response_is_its_turns_and_what_came_between(exact: tuple[Path, str]) -> None:
    kept = table(exact[0], "kept")
    assert kept["turn_tokens"].list.len().max() == 3
    sampled, added = kept["turn_tokens"].list.sum(), kept["added_tokens"].list.sum()
    assert (sampled == kept["tokens"]).all()
    assert (sampled + added == kept["completion_ids"].list.len()).all()
    assert added.sum() > 0
    assert (kept["reward"] == kept["rewards/environment"]).all()


def test_what_the_environment_says_is_the_templates_delta(exact: tuple[Path, str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exact[0].parent / "chat-model")
    kept = table(exact[0], "kept").filter(pl.col("turn_tokens").list.len() == 2)
    for row in kept.iter_rows(named=True):
        first, added = row["turn_tokens"][0], row["added_tokens"][0]
        between = tokenizer.decode(row["completion_ids"][first : first + added])
        said = row["completion_ids"][:first]
        end = "\n" if said[-1] == tokenizer.eos_token_id else "<|im_end|>\n"
        assert between.startswith(f"{end}<|im_start|>user\n")
        assert between.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_every_prompt_is_trained_once_an_epoch(exact: tuple[Path, str]) -> None:
    assert set(times_trained(exact[0]).values()) == {2}
    assert set(kept_groups(exact[0]).values()) == {3}


def test_metrics_tell_turns_and_evaluations_talk(exact: tuple[Path, str]) -> None:
    rows = metrics(exact[0])
    assert all(1 <= row["environment/turns"] <= 3 for row in rows)
    assert any(row["tools/call_frequency"] > 0 for row in rows)
    assert all(row["environment/said"] > 0 for row in rows)
    assert sum(row["engine/cached_tokens"] for row in rows) > 0
    summary = json.loads((exact[0] / "summary.json").read_text())
    assert summary["after"]["eval/ungraded"] == 0
    assert summary["after"]["eval/sampled_mean_length"] > 0


def test_its_journal_replays(exact: tuple[Path, str]) -> None:
    assert cli_here("journal", "replay", exact[0]).returncode == 0


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("off", marks=pytest.mark.slow),
        pytest.param("race", marks=pytest.mark.wide),
        pytest.param("auto", marks=pytest.mark.slow),
    ],
)
def test_modes_sample_the_same_and_lose_no_prompt(
    shop: Talkshop, exact: tuple[Path, str], mode: str
) -> None:
    changes = {"devices__per_node": 2, "environment__options": {"pause_s": 0.002}}
    folder, _ = run(shop.config(mode, mode, **TALKING, **changes))
    mine, theirs = responses(folder), responses(exact[0])
    shared = mine.keys() & theirs.keys()
    assert shared
    assert all(mine[key] == theirs[key] for key in shared)
    assert set(times_trained(folder).values()) == {2}
    assert cli_here("journal", "replay", folder).returncode == 0


@pytest.mark.wide
def test_a_run_that_was_stopped_goes_on_exactly(shop: Talkshop) -> None:
    fixed = {"deterministic": True, "checkpoint": {"every": 1, "keep": 9}}
    whole, _ = run(shop.config("whole", "exact", **TALKING, **fixed))
    few = {"environment": ECHO | {"concurrency": 2, "processes": 2}}  # the others wait for turns
    config = shop.config("parts", "exact", **TALKING | few, **fixed)
    run(config.model_copy(update={"steps": 2}))
    folder, _ = run(config, resume=True)
    last = max(checkpoints(whole))
    assert last == max(checkpoints(folder))
    digests = [weights_digest(each / f"checkpoint-{last}") for each in (whole, folder)]
    assert digests[0] == digests[1]


def test_functions_see_the_whole_conversation(shop: Talkshop) -> None:
    judge = shop.folder / "talks.py"
    judge.write_text(
        "def turns(completions, **_):\n"
        "    return [float(sum(m['role'] == 'assistant' for m in c)) for c in completions]\n"
    )
    reward = [{"function": f"{judge}:turns", "weight": 0.5}]
    changes = TALKING | {"rewards": reward, "environment": ECHO | {"weight": 2.0}, "epochs": 1}
    folder, _ = run(shop.config("judged", "exact", **changes))
    kept = table(folder, "kept")
    turns = kept["turn_tokens"].list.len()
    assert (kept["rewards/turns"] == turns).all()
    total = 0.5 * turns + 2.0 * kept["rewards/environment"]
    assert np.allclose(kept["reward"], total)


def test_limits_cut_an_episode(shop: Talkshop) -> None:
    changes = TALKING | {"environment": ECHO | {"max_turns": 1}, "epochs": 1}
    folder, _ = run(shop.config("cut", "exact", **changes))
    kept = table(folder, "kept")
    assert (kept["turn_tokens"].list.len() == 1).all()
    went_on = kept["tool_calls"] > 0
    assert went_on.any()
    assert (kept["finish_reason"].filter(went_on) == "length").all()


@pytest.mark.wide
def test_few_at_a_time_are_all_there_in_the_end(shop: Talkshop) -> None:
    changes = TALKING | {"environment": ECHO | {"concurrency": 2, "processes": 2}, "epochs": 1}
    folder, _ = run(shop.config("few", "exact", **changes))
    assert set(kept_groups(folder).values()) == {3}


@pytest.mark.wide
def test_a_stop_string_ends_each_turn(shop: Talkshop) -> None:
    """Those of earlier turns end no later one at its first token."""
    changes = TALKING | {"rollout__stop": ["a", "e", "o", "0", "1"], "epochs": 1}
    folder, _ = run(shop.config("stops", "exact", **changes))
    later = table(folder, "kept")["turn_tokens"].list.slice(1).explode().drop_nulls()
    assert later.max() > 1


@pytest.mark.wide
def test_an_agent_is_trained_as_it_is(shop: Talkshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a program, which has of this environment what it needs and what it is given by name."""
    agent = shop.folder / "agent.py"
    agent.write_text(AGENT)
    monkeypatch.setenv("SHOP_WORD", "0.5")
    monkeypatch.setenv("SHOP_KEY", "hunter2")
    environment = {"kind": "agent", "path": [str(agent)], "step_timeout_s": 60.0}
    environment |= {"variables": ["SHOP_WORD"]}
    changes = TALKING | {"environment": environment, "epochs": 1}
    folder, _ = run(shop.config("agent", "exact", **changes))
    kept = table(folder, "kept")
    assert set(times_trained(folder).values()) == {1}
    assert kept["prompt_text"].str.contains("You are asked").all()
    ended = kept.filter(pl.col("finish_reason") == "stop")
    assert (ended["turn_tokens"].list.len() == 2).all()
    assert ended["rewards/environment"].sum() > 0
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    for line in map(json.loads, lines):
        assert (line["environment/word"], line["environment/secrets"]) == (0.5, 0.0)


@pytest.mark.wide
def test_a_whole_conversation_is_bounded(shop: Talkshop) -> None:
    """What the environment says counts, whatever the model may still sample."""
    environment = ECHO | {"max_total_tokens": 45}
    changes = TALKING | {"environment": environment, "rollout__max_completion_length": 40}
    folder, _ = run(shop.config("bounded", "exact", **changes, epochs=1))
    kept = table(folder, "kept")
    assert kept["completion_ids"].list.len().max() <= 45
    cut = kept.filter((pl.col("finish_reason") == "length") & (pl.col("tokens") < 40))
    assert cut.height > 0


def test_of_an_episodes_rewards_the_last_or_the_sum_counts() -> None:
    record = EpisodeRecord(rewards=[0.25, 0.5, 2.0])
    assert (record.reward("last"), record.reward("sum")) == (2.0, 2.75)
    assert EpisodeRecord().reward("last") is None


@pytest.mark.wide
def test_the_last_reward_may_count_alone(shop: Talkshop, exact: tuple[Path, str]) -> None:
    changes = TALKING | {"environment": ECHO | {"reward": "last"}, "epochs": 1}
    folder, _ = run(shop.config("last", "exact", **changes))
    names = ["prompt", "sample_index", "turn_tokens", "reward"]
    last, summed = (table(f, "kept").filter(pl.col("step") == 0) for f in (folder, exact[0]))
    both = last.select(names).join(summed.select(names), on=names[:2])
    several = both["turn_tokens"].list.len() > 1
    assert both.height == 12
    assert several.any()
    assert (both["reward"] == both["reward_right"]).to_list() == (~several).to_list()
