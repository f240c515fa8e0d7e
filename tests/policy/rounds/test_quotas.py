import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.core.groups import over_provision
from rollpacker.policy.rounds.race import split

weights = st.dictionaries(
    st.text(min_size=1, max_size=3), st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=6
).filter(lambda w: sum(w.values()) > 1e-6)


@given(st.integers(0, 5000), weights)
def test_parts_sum_to_the_total_and_are_within_one_of_their_share(total, shares):
    parts = split(total, shares)
    assert sum(parts.values()) == total
    assert list(parts) == list(shares)
    whole = math.fsum(shares.values())
    for name, weight in shares.items():
        assert abs(parts[name] - total * weight / whole) < 1 + 1e-6
        assert parts[name] >= 0


def test_thirds_go_to_the_earlier_domains():
    assert split(128, {"math": 1, "code": 1, "judge": 1}) == {"math": 43, "code": 43, "judge": 42}
    assert split(16, {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}) == {"a": 6, "b": 5, "c": 5}


def test_a_domain_without_weight_gets_nothing():
    assert split(7, {"a": 0, "b": 2}) == {"a": 0, "b": 7}


@pytest.mark.parametrize("bad", [{"a": -1.0}, {"a": math.inf}, {"a": math.nan}, {"a": 0.0}, {}])
def test_weights_that_split_nothing_are_refused(bad):
    with pytest.raises(ValueError, match="weight"):
        split(4, bad)


@given(st.integers(0, 2000), st.integers(100, 400))
def test_over_provision_is_the_exact_ceiling(count, percent):
    assert over_provision(count, percent / 100) == math.ceil(Fraction(percent, 100) * count)
