"""Emulated time on a clock that the test sets."""

import math

import pytest

from rollpacker.emulate.messages import Lateness, WallAgenda


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_actions_run_when_they_are_due(clock: Clock) -> None:
    agenda, ran = WallAgenda(10.0, clock), []
    assert math.isinf(agenda.wait_s())
    agenda.at(20.0, lambda: ran.append(agenda.now))
    agenda.at(5.0, lambda: ran.append(agenda.now))
    assert agenda.wait_s() == pytest.approx(0.5)
    assert not agenda.run_due()
    clock.now += 0.5
    assert agenda.run_due()
    assert (ran, agenda.wait_s()) == ([5.0], pytest.approx(1.5))
    clock.now += 7.0
    assert agenda.wait_s() == 0.0
    assert agenda.run_due()
    assert ran == [5.0, 20.0]
    assert not agenda.run_due()


def test_lateness_does_not_add_up(clock: Clock) -> None:
    """Each piece of work begins when the last one was to end, however late that was seen."""
    agenda, ends = WallAgenda(10.0, clock), []

    def work() -> None:
        ends.append(agenda.now)
        agenda.after(1.0, work)

    agenda.after(1.0, work)
    for _ in range(20):
        clock.now = agenda.clock_s(agenda.next_at or 0.0) + 0.05
        assert agenda.run_due()
    assert ends == pytest.approx([float(n) for n in range(1, 21)])
    assert agenda.lateness.counts.total() == 20
    assert agenda.lateness.longest_s == pytest.approx(0.05)


def test_what_comes_late_happens_at_its_time(clock: Clock) -> None:
    agenda = WallAgenda(10.0, clock)
    clock.now += 2.0
    when = agenda.of(101.0)
    assert when == pytest.approx(10.0)
    agenda.at(when, lambda: agenda.after(30.0, lambda: None))
    assert agenda.run_due()
    assert agenda.wait_s() == pytest.approx(2.0)
    assert agenda.clock_s(agenda.now) == pytest.approx(101.0)


def test_quantiles_of_lateness() -> None:
    late = Lateness()
    assert late.quantile(0.5) == 0.0
    for milliseconds in range(1, 101):
        late.add(1e-3 * milliseconds)
    assert 0.05 <= late.quantile(0.5) <= 0.06
    assert 0.099 <= late.quantile(0.99) <= late.longest_s == 0.1
    both = late + Lateness()
    assert both.quantile(0.5) == late.quantile(0.5)
