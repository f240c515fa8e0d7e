"""Length-bucketed rounds: nothing lost, sorted by earlier lengths, order of data before those."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from policy_world import World, settings
from test_rollout_machine import finish_all

from rollpacker.core import events as ev
from rollpacker.core.types import Prompt, PromptId
from rollpacker.policy.rounds.buckets import Buckets


def prompts(count: int, domain: str = "a") -> list[Prompt]:
    return [Prompt(id=PromptId(f"{domain}{i}"), domain=domain) for i in range(count)]


def test_unvisited_prompts_keep_the_order_of_the_data() -> None:
    buckets = Buckets(3, lambda _: None)
    assert buckets.missing({"a": 2}, {"a": 10}) == {"a": 6}
    buckets.add(prompts(6), {"a": 2}, seed=0)
    assert [p.id for p in buckets.take({"a": 2})] == ["a0", "a1"]
    assert buckets.missing({"a": 2}, {"a": 4}) == {}


@given(st.permutations(range(12)), st.integers(0, 5))
def test_a_window_becomes_rounds_of_like_lengths(order: list[int], seed: int) -> None:
    expected = {PromptId(f"a{i}"): float(length) for i, length in enumerate(order)}
    buckets = Buckets(3, expected.get)
    buckets.add(prompts(12), {"a": 4}, seed)
    rounds = [buckets.take({"a": 4}) for _ in range(3)]
    lengths = [sorted(int(expected[p.id]) for p in group) for group in rounds]
    assert sorted(lengths) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_what_is_held_survives_a_checkpoint() -> None:
    buckets = Buckets(2, lambda _: None)
    buckets.add(prompts(4), {"a": 2}, seed=0)
    again = Buckets(2, lambda _: None)
    again.load_state_dict(buckets.state_dict())
    assert again.held() == {"a": 4}
    assert again.take({"a": 4}) == buckets.take({"a": 4})


def test_second_epoch_runs_long_prompts_together() -> None:
    given_ = settings(
        {
            "prompts_per_step": 2,
            "num_generations": 2,
            "tail_batching": {"mode": "exact", "bucket_rounds": 4},
        },
        {"a": 8},
    )
    world = World(given_)
    rounds: list[set[str]] = []
    for _ in range(2):
        world.fresh = World(given_).fresh
        while not world.epoch_over():
            world.start()
            while world.running:
                attempt = min(world.running)
                name = world.index[attempt][0]
                world.finish(attempt, 90 if int(name[1:]) % 4 == 0 else 5)
            finish_all(world)
            rounds.append({str(name) for name in world.accepted})
    assert len(rounds) == 8
    assert {"a0", "a4"} in rounds[4:]
    assert {"a0", "a4"} not in rounds[:4]
    assert all(count == 2 for count in world.epoch_trained.values())
    assert any(isinstance(event, ev.PromptsDrawn) for event, _ in world.log)
