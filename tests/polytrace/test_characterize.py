import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.core.groups import intraclass_correlation
from rollpacker.polytrace.describe import (
    Layout,
    characterize,
    imbalance,
    sentences,
    synchronous_round,
)
from rollpacker.polytrace.model.workload import generate, load_model
from rollpacker.polytrace.schema import REWARD_BATCHES, SAMPLES, Trace, TraceError
from rollpacker.polytrace.statistics import (
    area_under_curve,
    dependence,
    drift,
    intervals,
    known_cap,
    tail_index,
    tail_prediction,
)

PAPER = {size: load_model(f"paper-{size}").lengths for size in ("8k", "16k", "32k")}

FOLDER = os.environ.get("ROLLPACKER_POLYTRACE")
public = pytest.mark.skipif(FOLDER is None, reason="ROLLPACKER_POLYTRACE is not set")
Groups = dict[tuple[int, str], list[int]]


def table(rows: list[dict[str, object]], schema: dict[str, pl.DataType]) -> pl.DataFrame:
    return pl.DataFrame([dict.fromkeys(schema) | row for row in rows], schema=schema)


def trace(groups: Groups, **columns: object) -> Trace:
    rows = [
        {
            "task": "toy",
            "step": step,
            "prompt": prompt,
            "index": index,
            "prompt_tokens": 10,
            "response_tokens": tokens,
            "state": "kept",
        }
        | columns
        for (step, prompt), lengths in groups.items()
        for index, tokens in enumerate(lengths)
    ]
    return Trace(samples=table(rows, SAMPLES))


def anova(groups: list[np.ndarray]) -> float:
    """The textbook's formula for groups of one size."""
    size = groups[0].size
    means = np.array([group.mean() for group in groups])
    between = size * means.var(ddof=1)
    within = float(np.mean([group.var(ddof=1) for group in groups]))
    return (between - within) / (between + (size - 1) * within)


def test_icc_is_the_textbooks() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(30, 1)) + rng.normal(size=(30, 5))
    groups = np.repeat(np.arange(30), 5)
    got = intraclass_correlation(values.ravel(), groups)
    assert got == pytest.approx(anova(list(values)))


def test_icc_of_known_cases() -> None:
    groups = np.repeat(np.arange(4), 3)
    own = intraclass_correlation(groups.astype(float), groups)
    assert own == pytest.approx(1.0)
    same = intraclass_correlation(np.tile([1.0, 2.0, 3.0], 4), groups)
    assert same == pytest.approx(-0.5)
    assert math.isnan(intraclass_correlation(np.arange(3.0), np.arange(3)))
    rng = np.random.default_rng(1)
    many = np.repeat(np.arange(4000), 8)
    drawn = np.sqrt(0.3) * rng.normal(size=4000)[many] + np.sqrt(0.7) * rng.normal(size=many.size)
    assert intraclass_correlation(drawn, many) == pytest.approx(0.3, abs=0.02)


def test_hill_finds_the_exponent_of_a_power_law_even_when_it_is_cut_off() -> None:
    lengths = 100.0 * np.random.default_rng(2).random(50_000) ** (-1.0 / 1.7)
    assert tail_index(lengths, None) == pytest.approx(1.7, rel=0.06)
    cap = float(np.quantile(lengths, 0.98))
    assert tail_index(np.minimum(lengths, cap), cap) == pytest.approx(1.7, rel=0.12)
    assert tail_index(np.full(1000, 5.0), 5) is None
    assert tail_index(np.arange(1.0, 10.0), None) is None


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=40))
def test_area_is_the_share_of_pairs_in_order(pairs: list[tuple[int, bool]]) -> None:
    positive = [score for score, label in pairs if label]
    negative = [score for score, label in pairs if not label]
    scores, labels = map(np.array, zip(*pairs, strict=True))
    got = area_under_curve(scores.astype(float), labels)
    if not positive or not negative:
        assert got is None
    else:
        wins = [(p > n) + 0.5 * (p == n) for p in positive for n in negative]
        assert got == pytest.approx(np.mean(wins))


def test_drift_is_found_and_not_invented() -> None:
    rng = np.random.default_rng(3)

    def growing(slope: float) -> Trace:
        return trace(
            {
                (step, f"{step}/{number}"): np.rint(
                    500 * np.exp(slope * step + 0.3 * rng.normal(size=4))
                )
                .astype(int)
                .tolist()
                for step in range(6)
                for number in range(20)
            }
        )

    found = drift(growing(0.1).samples)
    assert found is not None
    assert found.slope == pytest.approx(0.1, abs=0.02)
    assert found.slope_p < 1e-6
    assert found.differ_p < 1e-3
    flat = drift(growing(0.0).samples)
    assert flat is not None
    assert flat.slope_p > 0.01
    assert drift(trace({(0, "a"): [1, 2], (0, "b"): [3, 4]}).samples) is None


def test_the_tail_is_predictable_where_length_is_the_prompts() -> None:
    own = trace({(0, str(number)): [100 * number + k for k in range(6)] for number in range(1, 21)})
    sure = tail_prediction(own.samples)
    assert (sure.first, sure.fourth, sure.history) == (1.0, 1.0, None)
    again: Groups = {
        (step, str(number)): [100 * number, 100 * number + step]
        for step in range(3)
        for number in range(1, 21)
    }
    recurring = tail_prediction(trace(again).samples)
    assert recurring.history == 1.0
    assert recurring.fourth is None
    rng = np.random.default_rng(4)
    noise = {(0, str(n)): rng.integers(1, 1000, 5).tolist() for n in range(600)}
    chance = tail_prediction(trace(noise).samples)
    assert chance.first == pytest.approx(0.5, abs=0.1)


def test_a_round_by_hand() -> None:
    layout = Layout(workers=2, slots=2, base_s=1.0, per_sequence_s=0.5)
    # First engine: 2 and 4 at once, then 2 in the first's slot; second: one step of each, then 4.
    done = synchronous_round(np.array([2, 4, 2, 5]), Layout(workers=1, slots=2, base_s=1.0))
    assert done.idle == 0.0
    pair = synchronous_round(np.array([2, 4, 1, 1]), layout)
    # Engine 0: 2 steps of two (2 s each), 2 of one (1.5 s); engine 1: 1 step of two.
    assert pair.seconds == pytest.approx(7.0)
    assert pair.idle == pytest.approx(1.0 - (7.0 + 2.0) / 2 / 7.0)
    used = 2 * 2 * 2.0 + 2 * 1.5 + 2 * 2.0
    assert pair.bubble == pytest.approx(1.0 - used / (7.0 * 2 * 2))


def test_a_full_engine_admits_first_come_first_served() -> None:
    layout = Layout(workers=1, slots=2, base_s=1.0, per_sequence_s=0.0)
    # Slots: 3 then 4; 5 then 1. The last of them ends at step 7.
    assert synchronous_round(np.array([3, 5, 4, 1]), layout).seconds == pytest.approx(7.0)


def test_equal_lengths_leave_nobody_waiting() -> None:
    done = synchronous_round(np.full(64, 100), Layout(workers=4))
    assert (done.idle, done.bubble) == (0.0, 0.0)


def test_balancing_never_makes_it_worse() -> None:
    skewed = trace({(0, str(n)): [10 if n < 8 else 1000] for n in range(16)})
    found = imbalance(skewed.samples, 2)
    assert found.as_dealt == pytest.approx(8 * 1010 / (4 * 1010 + 4 * 20))
    assert found.balanced == pytest.approx(1.0)
    ranked = skewed.samples.with_columns((pl.int_range(pl.len()) % 2).cast(pl.Int32).alias("r"))
    dealt = ranked.with_columns(pl.col("r").alias("dp_rank")).drop("r")
    assert imbalance(dealt, 8).as_dealt == pytest.approx(1.0)


def test_intervals_hold_the_estimate_and_narrow() -> None:
    def width(prompts: int) -> float:
        lengths = PAPER["8k"].sample(np.random.default_rng(5), prompts, 8)
        groups = np.repeat(np.arange(prompts), 8)
        tokens = lengths.ravel().astype(float)
        found = intervals(tokens, groups)
        assert found["mean"][0] < tokens.mean() < found["mean"][1]
        assert found["icc"][0] < intraclass_correlation(tokens, groups) < found["icc"][1]
        assert found["p50"][0] <= np.median(tokens) <= found["p50"][1]
        return found["mean"][1] - found["mean"][0]

    assert width(800) < 0.5 * width(50)


def test_the_order_of_rows_changes_nothing() -> None:
    made = generate(load_model("math"), steps=2, prompts=12, responses=6, seed=3)
    shuffled = Trace(samples=made.samples.sample(fraction=1.0, shuffle=True, seed=1))
    assert characterize(made) == characterize(shuffled)


def test_a_report_is_json_and_has_what_scripts_read() -> None:
    made = generate(load_model("code"), steps=2, prompts=8, seed=1)
    report = characterize(made)["code"]
    told = json.loads(json.dumps(asdict(report), allow_nan=False))
    wanted = "responses mean p50 p75 p99 max cap_share icc icc_log tail_auc_first"
    wanted += " tail_auc_fourth idle_fraction"
    assert set(wanted.split()) <= set(told)
    assert told["responses"] == 2 * 8 * 8
    assert 0.0 < told["reward_time_share"] < 1.0


def test_aborted_responses_are_left_out_and_told() -> None:
    whole: Groups = {(0, str(n)): [100 + n, 120 + n] for n in range(10)}
    partial: Groups = {(0, f"x{n}"): [5, 6] for n in range(5)}
    both = pl.concat([trace(whole).samples, trace(partial, state="aborted").samples])
    report = characterize(Trace(samples=both))["toy"]
    assert (report.responses, report.aborted) == (20, 10)
    assert report.mean == pytest.approx(114.5)
    assert any("aborted" in sentence for sentence in sentences(report))
    with pytest.raises(TraceError, match="no finished response"):
        characterize(trace(partial, state="aborted"))


def test_caps_are_recorded_inferred_or_unknown() -> None:
    assert known_cap(trace({(0, "a"): [5, 9]}, cap=16).samples) == 16
    assert known_cap(trace({(0, "a"): [5, 9, 9]}).samples) == 9
    assert known_cap(trace({(0, "a"): [5, 9]}).samples) is None
    assert known_cap(trace({(0, "a"): [5, 19]}, cap=16).samples) is None
    assert known_cap(trace({(0, "a"): [5, 9], (0, "b"): [9, 7]}).samples) == 9
    assert known_cap(trace({(0, "a"): [9, 9], (0, "b"): [5, 7]}).samples) == 9


def test_a_response_that_is_repeated_is_no_cap() -> None:
    """At temperature 0 a prompt has the same response in every step, and in a group."""
    again = {(0, "a"): [9], (0, "b"): [5], (1, "a"): [9], (1, "b"): [5]}
    assert known_cap(trace(again).samples) is None
    grouped = {visit: lengths * 2 for visit, lengths in again.items()}
    assert known_cap(trace(grouped).samples) is None
    report = characterize(trace({(0, "a"): [5, 9, 9, 7]}))["toy"]
    assert report.cap_share == 0.5


def test_one_response_is_enough() -> None:
    report = characterize(trace({(0, "a"): [5]}))["toy"]
    assert (report.mean, report.icc, report.tail_auc_first, report.drift) == (5.0, None, None, None)
    assert all(isinstance(sentence, str) for sentence in sentences(report))


def test_shares_of_rewards_tools_and_cache() -> None:
    turns = [
        {"prompt_tokens": 100, "cached_tokens": 0, "completion_tokens": 3, "latency_s": 2.0},
        {"prompt_tokens": 300, "cached_tokens": 100, "completion_tokens": 4, "latency_s": 1.0},
    ]
    tools = [{"turn": 0, "name": "search", "latency_s": 1.0, "tokens": 190, "status": "success"}]
    toy = trace({(0, "a"): [7]}, turns=turns, tools=tools, start_s=1.0, end_s=4.0, reward_s=1.0)
    report = characterize(toy)["toy"]
    assert report.tool_latency_share == pytest.approx(0.25)
    assert report.prefix_cache_share == pytest.approx(0.25)
    assert report.reward_time_share == pytest.approx(0.25)
    batches = [
        {"task": "toy", "step": 0, "dp_rank": rank, "batch_size": 1, "reward_time_s": seconds}
        for rank, seconds in enumerate((2.0, 9.0))
    ]
    slow = Trace(samples=toy.samples, reward_batches=table(batches, REWARD_BATCHES))
    assert characterize(slow)["toy"].reward_time_share == pytest.approx(0.75)


def test_sentences_say_what_to_do() -> None:
    math_report = characterize(generate(load_model("math"), steps=4, seed=0))["math"]
    told = " ".join(sentences(math_report))
    assert "the longest" in told
    assert "gain" not in told, "gains are simulated, not guessed from lengths"
    code = characterize(generate(load_model("code"), steps=4, seed=0))["code"]
    told = " ".join(sentences(code))
    assert "cut off" in told


def test_one_rule_says_how_length_depends_on_prompts() -> None:
    """The report of a trace and the estimate say the same of it."""
    icc, icc_log = 0.16, 0.27
    report = characterize(trace({(0, "a"): [5, 9], (0, "b"): [7, 20]}))["toy"]
    told = sentences(replace(report, icc=icc, icc_log=icc_log))
    assert any("length is partly a property of the prompt" in each for each in told)
    words = dependence(icc, icc_log)
    assert words == "partly a property of the prompt"
    assert dependence(0.05, 0.1) == "mostly chance, hardly a property of the prompt"
    assert dependence(0.7, 0.8) == "a property of the prompt"


MEASURED = {
    "verl_dapo_32b": (580, 466, 700, 2550, 10112, 0.05),
    "rllm_code_14b": (9382, 9900, 14290, 16000, 16000, 0.88),
    "search_r1_7b": (204, 155, 233, 884, 4272, 0.13),
    "verl_video_7b": (177, 159, 192, 315, 16000, 0.00),
}


@public
@pytest.mark.parametrize("name", MEASURED)
def test_public_traces_have_their_published_figures(name: str) -> None:
    from rollpacker.polytrace.formats import read

    (report,) = characterize(read(Path(str(FOLDER)) / name)).values()
    mean, p50, p75, p99, longest, icc = MEASURED[name]
    # The figures are of longer excerpts of the same runs than the folders hold.
    assert report.mean == pytest.approx(mean, rel=0.06)
    assert report.p50 == pytest.approx(p50, rel=0.13)
    assert report.p75 == pytest.approx(p75, rel=0.03)
    assert report.p99 == pytest.approx(p99, rel=0.11)
    assert report.max == longest
    assert report.icc == pytest.approx(icc, abs=0.045)
