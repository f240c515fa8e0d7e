import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rollpacker.core.types import Prompt, PromptId
from rollpacker.data.base import DataError
from rollpacker.data.source import PromptSource


def prompts(sizes: dict[str, int]) -> list[Prompt]:
    return [Prompt(id=PromptId(f"{d}{i}"), domain=d) for d, n in sizes.items() for i in range(n)]


class ExactlyOnce(RuleBasedStateMachine):
    """However it is drawn from, saved and restored: each prompt once per epoch, same order."""

    @initialize(
        sizes=st.dictionaries(st.sampled_from("abc"), st.integers(1, 12), min_size=1),
        seed=st.integers(0, 5),
        shuffle=st.booleans(),
    )
    def begin(self, sizes, seed, shuffle):
        self.prompts = prompts(sizes)
        self.arguments = (self.prompts, seed, shuffle)
        self.source = PromptSource(*self.arguments)
        self.drawn: list[Prompt] = []
        self.saved: tuple[str, list[Prompt]] | None = None

    @rule(counts=st.dictionaries(st.sampled_from("abc"), st.integers(0, 5)))
    def draw(self, counts):
        counts = {d: n for d, n in counts.items() if d in self.source.quotas}
        before = self.source.remaining()
        got = self.source.draw(counts)
        for domain, count in counts.items():
            of_domain = [p for p in got if p.domain == domain]
            assert len(of_domain) == min(count, before[domain])
        self.drawn += got

    @rule()
    def next_epoch(self):
        if not any(self.source.remaining().values()):
            assert {p.id for p in self.drawn} == {p.id for p in self.prompts}
        self.source.next_epoch()
        self.drawn = []

    @rule()
    def save(self):
        self.saved = (json.dumps(self.source.state_dict()), list(self.drawn))

    @rule()
    def restore_into_a_new_process(self):
        if self.saved is None:
            return
        state, drawn = self.saved
        expected = PromptSource(*self.arguments)
        for _ in range(json.loads(state)["epoch"]):
            expected.next_epoch()
        whole = expected.draw(expected.quotas)
        self.source = PromptSource(*self.arguments)
        self.source.load_state_dict(json.loads(state))
        self.drawn = list(drawn)
        rest = PromptSource(*self.arguments)
        rest.load_state_dict(json.loads(state))
        resumed = [*drawn, *rest.draw(rest.quotas)]
        for domain in rest.quotas:
            mine = [p for p in resumed if p.domain == domain]
            assert mine == [p for p in whole if p.domain == domain]

    @invariant()
    def never_twice(self):
        assert len({p.id for p in self.drawn}) == len(self.drawn)
        left = sum(self.source.remaining().values())
        assert len(self.drawn) + left == len(self.prompts)


ExactlyOnce.TestCase.settings = settings(stateful_step_count=25)
TestExactlyOnce = ExactlyOnce.TestCase


def order(source: PromptSource) -> list[str]:
    return [p.id for p in source.draw(source.quotas)]


def test_epochs_and_seeds_have_their_own_order():
    some = prompts({"a": 30})
    orders = []
    for seed in (0, 1):
        source = PromptSource(some, seed)
        orders.append(order(source))
        source.next_epoch()
        orders.append(order(source))
    assert len({tuple(o) for o in orders}) == 4
    assert all(sorted(o) == sorted(orders[0]) for o in orders)
    assert order(PromptSource(some, 0)) == orders[0]


def test_order_does_not_depend_on_other_domains_or_row_order():
    alone = order(PromptSource(prompts({"a": 20}), 0))
    mixed = order(PromptSource(prompts({"b": 5, "a": 20})[::-1], 0))
    assert [i for i in mixed if i.startswith("a")] == alone


def test_unshuffled_keeps_the_order_of_the_data():
    some = prompts({"a": 20})
    source = PromptSource(some, 0, shuffle=False)
    assert order(source) == [p.id for p in some]
    source.next_epoch()
    assert order(source) == [p.id for p in some]
    assert source.epoch == 1


def test_unknown_domains_are_refused():
    with pytest.raises(ValueError, match=r"no prompts of domain 'x' \(known: \['a'\]\)"):
        PromptSource(prompts({"a": 1}), 0).draw({"x": 1})


def test_a_state_of_other_data_or_another_seed_is_refused():
    state = PromptSource(prompts({"a": 3}), 0).state_dict()
    with pytest.raises(DataError, match=r"other data: the content of data\.path has changed"):
        PromptSource(prompts({"a": 4}), 0).load_state_dict(state)
    told = {prompt.id: "1+1" for prompt in prompts({"a": 3})}
    others = PromptSource(prompts({"a": 3}), 0, told=told | {PromptId("a1"): "1+2"})
    said = PromptSource(prompts({"a": 3}), 0, told=told).state_dict()
    PromptSource(prompts({"a": 3}), 0, told=told).load_state_dict(said)
    with pytest.raises(
        DataError, match=r"other prompts of the same ids: the content of data\.path"
    ):
        others.load_state_dict(said)
    with pytest.raises(DataError, match="made with seed 0"):
        PromptSource(prompts({"a": 3}), 1).load_state_dict(state)
