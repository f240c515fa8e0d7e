"""Simulated engines that decode ahead."""

from dataclasses import dataclass

import pytest

from rollpacker.sim.costs.costs import PLAIN, Ahead, Rule, ahead_terms
from rollpacker.sim.workload.workload import SimulatedRequest
from rollpacker.sim.world.decoder import Decoder


@dataclass(frozen=True)
class Affine:
    """Costs with all the KV one likes."""

    capacity: float = 1e9
    slack: float = 8.0
    slope: float = 2e-8

    def step_s(self, batch: int, context_tokens: float) -> float:
        return 5e-3 + 1e-4 * batch + self.slope * context_tokens

    def prefill_s(self, tokens: float) -> float:
        return 2e-5 * tokens

    def drafts_s(self, batch: int, drafted: int, ahead: Ahead) -> float:
        return ahead.row_s * drafted


def ahead(tokens: float, below: int = 8, row_cost: float = 0.0) -> Rule:
    return Rule(below, 16, 0, row_cost, Ahead(tokens=tokens, row_s=1e-4))


def test_decoding_ahead_takes_a_share_of_the_steps():
    plain, decoder = Decoder(Affine(), max_running=8), Decoder(Affine(), max_running=8)
    for each in (plain, decoder):
        each.submit(0.0, SimulatedRequest(0, "a", 10, 1000))
    decoder.speculate(0.0, ahead(2.0))
    end, long = decoder.next_event(0.0), plain.next_event(0.0)
    assert decoder.advance(end) == [(0, 1000)]
    drafts = 16 * 1e-4
    assert end == pytest.approx((long + 1000 * drafts) / 2, rel=1e-3)
    assert (decoder.steps, decoder.generated_tokens) == (500, 1000)
    assert decoder.verifications == pytest.approx(500)
    assert decoder.drafted == pytest.approx(500 * 16)
    assert decoder.accepted == pytest.approx(500)


def test_it_begins_where_few_enough_run():
    decoder = Decoder(Affine(), max_running=8)
    decoder.speculate(0.0, ahead(2.0, below=1))
    decoder.submit(0.0, SimulatedRequest(0, "a", 10, 100))
    decoder.submit(0.0, SimulatedRequest(1, "b", 10, 300))
    first = decoder.next_event(0.0)
    decoder.advance(first)
    assert (decoder.steps, decoder.drafted) == (100, 0)
    decoder.advance(decoder.next_event(first))
    assert decoder.steps == 200
    assert decoder.generated_tokens == 400


def test_it_may_begin_between_two_events():
    decoder = Decoder(Affine(slope=0.0), max_running=8)
    decoder.submit(0.0, SimulatedRequest(0, "a", 10, 1000))
    whole = decoder.next_event(0.0)
    decoder.speculate(whole / 2, ahead(4.0))
    end = decoder.next_event(whole / 2)
    assert decoder.advance(end) == [(0, 1000)]
    assert 0.5 * whole < end < 0.75 * whole
    assert decoder.steps == pytest.approx(625, abs=2)


def test_a_draft_ends_where_it_is_reached_too_seldom():
    assert ahead(1.0).pace(1) == PLAIN
    free, dear = ahead(3.0).pace(1), ahead(3.0, row_cost=0.2).pace(1)
    assert (free.tokens, free.drafted) == (pytest.approx(3.0), 16)
    assert 1.0 < dear.tokens < free.tokens
    assert ahead(3.0, row_cost=0.2).pace(4).drafted < dear.drafted
    assert ahead(3.0, row_cost=1.0).pace(8) == PLAIN
    assert ahead(3.0, below=64).pace(32).drafted == 128 // 32 - 1


def test_a_measured_pace_is_taken_as_it_is():
    measured = Ahead(tokens=3.0, drafted=4, measured={1: 1e-3, 4: 2e-3})
    rule = Rule(4, 16, 0, 0.0, measured)
    costs = Affine()
    assert ahead_terms(costs, 2, rule) == (pytest.approx(4e-3 / 3), costs.slope)
    assert ahead_terms(costs, 8, rule) == (costs.step_s(8, 0.0), costs.slope)
    assert rule.pace(1).drafted == 4


def test_more_tokens_than_a_draft_has_are_refused():
    with pytest.raises(ValueError, match=r"tokens=6 of a draft of drafted=4: at most one more"):
        Ahead(tokens=6.0, drafted=4)
