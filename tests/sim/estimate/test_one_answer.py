"""``trace characterize`` and ``estimate`` say the same of the same responses."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_estimate import trace_of

from rollpacker.polytrace.describe import characterize
from rollpacker.polytrace.schema import Trace
from rollpacker.sim import estimate as est
from rollpacker.sim.workload.source import of_trace


def drawn(seed: int, aborted: int, *, empty: bool) -> Trace:
    """Some responses are aborted, and one may have no token."""
    lengths = np.exp(np.random.default_rng(seed).normal(5.0, 1.2, (12, 4))).astype(int)
    if empty:
        lengths[0, 0] = 0
    samples = trace_of(np.minimum(lengths, 4000), cap=4000).samples
    states = ["kept"] * (lengths.size - aborted) + ["aborted"] * aborted
    return Trace(samples=samples.with_columns(pl.Series("state", states, samples["state"].dtype)))


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 100), st.integers(0, 6), st.booleans())
def test_both_say_the_same(seed: int, aborted: int, empty: bool) -> None:
    trace = drawn(seed, aborted, empty=empty)
    report = characterize(trace)["made"]
    found = est.estimate(est.on_paper_gpus("made", of_trace(trace)), trace, steps=1)
    assert found.read == report.responses == 48 - aborted
    assert found.icc == pytest.approx(report.icc, abs=0.0)
    assert report.aborted == aborted
    told = f"{aborted / 48:.0%} of the responses were aborted"
    assert any(told in line for line in found.sentences) == (aborted > 0)
