import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.core.groups import intraclass_correlation
from rollpacker.polytrace.model.lengths import CopulaLengths, LengthModel
from rollpacker.polytrace.model.workload import load_model
from rollpacker.polytrace.statistics import QuantileTable
from rollpacker.trace_replay.simulated import Redrawn

PAPER = {size: load_model(f"paper-{size}").lengths for size in ("8k", "16k", "32k")}

LEVELS = [0.5, 0.75, 0.9, 0.95, 0.99]
MATCHED = CopulaLengths.matching([10, 20, 30, 400, 500], 0.3, 0.4, 500)


def correlation(lengths: np.ndarray) -> float:
    groups = np.repeat(np.arange(lengths.shape[0]), lengths.shape[1])
    return intraclass_correlation(lengths.ravel().astype(float), groups)


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_settings_follow_their_parameters(name: str) -> None:
    model = PAPER[name]
    lengths = model.sample(np.random.default_rng(0), 20_000, 8)
    assert lengths.shape == (20_000, 8)
    assert lengths.dtype == np.int32
    assert lengths.min() >= 1
    assert lengths.max() == model.cap
    beyond = np.mean(lengths > model.tail_low)
    spread = np.hypot(model.between, model.within)
    body = np.mean(
        model.median * np.exp(spread * np.random.default_rng(1).standard_normal(200_000))
        > model.tail_low
    )
    expected = model.tail_share + (1.0 - model.tail_share) * body
    assert beyond == pytest.approx(expected, rel=0.05)


def test_a_body_without_tail_is_log_normal() -> None:
    model = LengthModel(median=500.0, between=0.4, within=0.3, cap=10**6)
    logs = np.log(model.sample(np.random.default_rng(2), 20_000, 8))
    assert np.median(logs) == pytest.approx(np.log(500.0), abs=0.01)
    assert logs.std() == pytest.approx(0.5, abs=0.01)
    assert correlation(logs) == pytest.approx(0.4**2 / 0.5**2, abs=0.015)


def test_a_concentrated_tail_belongs_to_few_prompts() -> None:
    def share_of_prompts(concentration: float) -> float:
        model = LengthModel(
            median=100.0,
            between=0.0,
            within=0.1,
            tail_share=0.1,
            tail_concentration=concentration,
            tail_low=1000.0,
            tail_high=2000.0,
            cap=4000,
        )
        lengths = model.sample(np.random.default_rng(3), 5000, 8)
        return float(np.mean((lengths > 500).any(axis=1)))

    assert share_of_prompts(1e4) == pytest.approx(1.0 - 0.9**8, abs=0.02)
    assert share_of_prompts(0.5) < 0.3


def test_traits_stay_with_a_prompt() -> None:
    model = PAPER["8k"]
    rng = np.random.default_rng(4)
    traits = model.traits(rng, 4000)
    first, again = (np.log(model.given(rng, traits, 8)).mean(axis=1) for _ in range(2))
    assert np.corrcoef(first, again)[0, 1] > 0.6
    assert np.corrcoef(traits[:, 0], first)[0, 1] > 0.5


@given(seed=st.integers(0, 2**32), prompts=st.integers(1, 20), responses=st.integers(1, 9))
@settings(max_examples=settings().max_examples // 4)
def test_a_seed_decides_everything(seed: int, prompts: int, responses: int) -> None:
    for model in (PAPER["16k"], MATCHED):
        one, two = (model.sample(np.random.default_rng(seed), prompts, responses) for _ in range(2))
        assert (one == two).all()
        assert one.shape == (prompts, responses)
        assert one.min() >= 1
        assert one.max() <= model.cap


@given(
    values=st.lists(st.integers(1, 30_000), min_size=30, max_size=300),
    icc=st.floats(0.0, 0.95),
)
@settings(max_examples=settings().max_examples // 10)
def test_the_copula_keeps_any_marginal(values: list[int], icc: float) -> None:
    model = CopulaLengths.matching(values, icc, icc)
    levels = (np.arange(4000) + 0.5) / 4000
    lengths = model.sample(np.random.default_rng(0), 4000, 4).ravel()
    near = model.marginal.at(np.clip([0.45, 0.55], 0.0, 1.0))
    assert near[0] - 1.0 <= np.median(lengths) <= near[1] + 1.0
    assert model.marginal.at(levels).min() >= min(values) * 0.999
    assert min(values) - 1 <= lengths.min()
    assert lengths.max() <= max(values) + 1


@pytest.mark.parametrize(("icc", "icc_log"), [(0.05, 0.06), (0.3, 0.35), (0.88, 0.93), (0.2, 0.3)])
def test_the_copula_meets_both_correlations(icc: float, icc_log: float) -> None:
    rng = np.random.default_rng(5)
    skewed = np.exp(6.0 + 0.8 * rng.standard_normal(5000))
    model = CopulaLengths.matching(skewed, icc, icc_log)
    assert model.intraclass() == pytest.approx((icc, icc_log), abs=0.01)
    made = model.sample(rng, 20_000, 8)
    assert correlation(made) == pytest.approx(icc, abs=0.03)
    assert correlation(np.log(made)) == pytest.approx(icc_log, abs=0.03)
    ours, theirs = np.quantile(made, LEVELS), np.quantile(skewed, LEVELS)
    assert ours == pytest.approx(theirs, rel=0.05)


def test_the_copula_keeps_the_mass_at_the_cap() -> None:
    rng = np.random.default_rng(6)
    capped = np.minimum(np.exp(9.0 + rng.standard_normal(5000)), 16_000.0)
    model = CopulaLengths.matching(capped, 0.8, 0.85, 16_000)
    made = model.sample(rng, 20_000, 8)
    assert np.mean(made == 16_000) == pytest.approx(np.mean(capped == 16_000), abs=0.01)


def test_a_constant_length_stays_constant() -> None:
    made = CopulaLengths.matching(np.full(50, 7.0), 0.0, 0.0).sample(
        np.random.default_rng(0), 10, 3
    )
    assert (made == 7).all()


def test_redrawn_lengths_stay_with_their_prompt() -> None:
    tokens = np.array([10.0, 11, 12, 500, 501, 90])
    groups = np.array([0, 0, 0, 1, 1, 2])
    source = Redrawn(tokens, groups)
    traits = source.traits(np.random.default_rng(0), 200)
    lengths = source.given(np.random.default_rng(1), traits, 6)
    for visit in range(3):
        mine = set(lengths[traits[:, 0] == visit].ravel().tolist())
        assert mine == set(tokens[groups == visit].tolist())


def test_wrong_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="tail_share"):
        LengthModel(median=5.0, between=0.1, within=0.1, tail_share=1.5, cap=10)
    with pytest.raises(ValueError, match="between and within"):
        LengthModel(median=5.0, between=-0.1, within=0.1, cap=10)
    with pytest.raises(ValueError, match="rho"):
        CopulaLengths(marginal=QuantileTable(levels=(0.0, 1.0), values=(1.0, 2.0)), rho=1.0)
    with pytest.raises(ValueError, match="from 0 to 1"):
        QuantileTable(levels=(0.0, 0.5), values=(1.0, 2.0))
    with pytest.raises(ValueError, match="not decrease"):
        QuantileTable(levels=(0.0, 1.0), values=(2.0, 1.0))
