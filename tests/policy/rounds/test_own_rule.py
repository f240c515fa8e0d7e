"""A rule of the user's ends a round: who waits, who is still graded, and when it is asked."""

from pathlib import Path

import pytest
from policy_world import World
from policy_world import settings as make_settings

from rollpacker.core import decisions as do
from rollpacker.core.types import RoundKind
from rollpacker.policy.rollout import RolloutPolicy

RULE = """
from rollpacker.policy.rounds.race import Racing
from rollpacker.policy.rounds.rule import TailRule

class Impatient(TailRule):
    def __init__(self, tail):
        super().__init__(tail)
        self.asked = 0

    def start(self, step, lengths):
        return Racing(eta_prompts=self.tail.eta_prompts, stops=True)

    def ends(self, round):
        self.asked += 1
        return round.longest > 50

    def state_dict(self):
        return {"asked": self.asked}

    def load_state_dict(self, state):
        self.asked = state["asked"]
"""


def world(folder: Path, prompts: int = 3, **rollout: object) -> World:
    (folder / "impatient.py").write_text(RULE, encoding="utf-8")
    tail = {"mode": f"{folder}/impatient.py:Impatient", "eta_prompts": 1.0, "audit_every": 0}
    changes = {"prompts_per_step": prompts, "num_generations": 2, "tail_batching": tail} | rollout
    return World(make_settings(changes, {"a": 9}))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def __init__(self): pass", "__init__ of .* failed: .*1 positional argument"),
        ("def start(self, step, lengths): pass", "start of .* a NoneType instead of a Racing"),
        ("def start(self, *_): return Racing(eta_prompts=0.5)", "both factors must be at least 1"),
        ("def start(self, *_): return Racing(eta_responses=0.5, stops=True)", "at least 1"),
        ("def start(self, *_): return Racing(eta_responses=float('nan'))", "at least 1"),
        ("def start(self, *_): return Racing(stops=True)", "has no method 'ends'"),
    ],
)
def test_rules_that_no_round_can_follow_are_refused(tmp_path: Path, code: str, said: str) -> None:
    """With fewer responses than a group has, the round had no end."""
    head = RULE.partition("class")[0]
    file = tmp_path / "wrong.py"
    file.write_text(f"{head}class Wrong(TailRule):\n    {code}\n", encoding="utf-8")
    tail = {"mode": f"{file}:Wrong"}
    with pytest.raises(ValueError, match=rf"^rollout\.tail_batching\.mode: .*{said}"):
        World(make_settings({"tail_batching": tail}, {"a": 9})).start()


def of(world: World, prompt: str) -> list[int]:
    return [attempt for attempt, (owner, _) in world.index.items() if owner == prompt]


def test_prompts_that_decode_wait_and_ended_ones_are_graded(tmp_path: Path) -> None:
    found = world(tmp_path)
    found.start()
    assert found.kind is RoundKind.SHORT
    assert len(found.running) == 6
    first, second, third = (of(found, f"a{i}") for i in range(3))
    for attempt in (*first, *second):
        found.finish(attempt, 10)
    found.finish(third[0], 60)
    assert not found.deferred, "ended before a group was there"
    for attempt in first:
        found.grade(attempt, 1.0)
    assert found.deferred == ["a2"]
    assert third[1] in found.stopping
    assert not found.running
    for attempt in second:
        found.grade(attempt, 0.0)
    assert set(found.accepted) == {"a0", "a1"}
    found.confirm_abort(third[0])
    found.confirm_abort(third[1])
    assert found.rollout_over


def test_what_it_remembers_is_saved(tmp_path: Path) -> None:
    found = world(tmp_path, prompts=1)
    found.start()
    one, other = of(found, "a0")
    found.finish(one, 10)
    found.finish(other, 20)
    found.grade(one, 1.0)
    found.grade(other, 0.0)
    state = found.policy.state_dict()
    again = RolloutPolicy(found.settings)
    again.load_state_dict(state)
    assert again.state_dict() == state


def test_a_state_stays_what_it_was_and_is_json(tmp_path: Path) -> None:
    """A step that is dropped is saved as it began, with a state that was asked for then."""
    own = """
class Remembers(Impatient):
    seen = ()

    def __init__(self, tail):
        super().__init__(tail)
        self.seen = {"asked": [], "kinds": self.seen}

    def ends(self, round):
        self.seen["asked"].append(round.longest)
        return False

    def state_dict(self):
        return self.seen

class Sets(Remembers):
    seen = frozenset()
"""
    file = tmp_path / "remembers.py"
    file.write_text(RULE + own, encoding="utf-8")
    tail = {"mode": f"{file}:Remembers", "eta_prompts": 1.0}
    changes = {"prompts_per_step": 2, "num_generations": 2, "tail_batching": tail}
    found = World(make_settings(changes, {"a": 9}))
    found.start()
    before = found.policy.state_dict()["measure"]["rule"]
    for attempt in of(found, "a0"):
        found.finish(attempt, 10)
    for attempt in of(found, "a0"):
        found.grade(attempt, 1.0)
    assert before["asked"] == []
    assert found.policy.state_dict()["measure"]["rule"]["asked"]
    wrong = make_settings(changes | {"tail_batching": {"mode": f"{file}:Sets"}}, {"a": 9})
    with pytest.raises(ValueError, match=r"state_dict of '.*:Sets' failed: .*frozenset"):
        RolloutPolicy(wrong).state_dict()


def test_dynamic_sampling_draws_no_more_for_a_round_that_ended(tmp_path: Path) -> None:
    found = world(tmp_path, prompts=2, dynamic_sampling={"enabled": True, "max_draws": 4})
    found.start()
    first, second = of(found, "a0"), of(found, "a1")
    for attempt, tokens in zip(first, (10, 60), strict=True):
        found.finish(attempt, tokens)
    for attempt, reward in zip(first, (1.0, 0.0), strict=True):
        found.grade(attempt, reward)
    assert found.deferred == ["a1"]
    for attempt in second:
        found.confirm_abort(attempt)
    draws = [made for _, all_ in found.log for made in all_ if isinstance(made, do.DrawPrompts)]
    assert len(draws) == 1
    assert found.rollout_over
