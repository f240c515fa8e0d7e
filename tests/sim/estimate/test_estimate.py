"""Estimates of tail batching's gain on somebody's own lengths."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from rollpacker.config.rollout import SpeculationConfig
from rollpacker.polytrace.schema import SAMPLES, Trace
from rollpacker.polytrace.statistics.statistics import dependence
from rollpacker.sim.costs.ahead import Ahead
from rollpacker.sim.costs.calibration import FOLDER
from rollpacker.sim.estimate import estimate as est
from rollpacker.sim.estimate.verdict import ModeEstimate, recommend, sentences
from rollpacker.sim.workload.source import of_trace


def trace_of(lengths: np.ndarray, *, cap: int, steps: int = 4, task: str = "made") -> Trace:
    """A trace of ``lengths``, shape (prompts, responses), split over steps."""
    prompts, responses = lengths.shape
    rows = [
        {
            "task": task,
            "step": prompt * steps // prompts,
            "prompt": f"p{prompt}",
            "index": index,
            "prompt_tokens": 100,
            "response_tokens": int(lengths[prompt, index]),
            "cap": cap,
            "state": "kept",
        }
        for prompt in range(prompts)
        for index in range(responses)
    ]
    return Trace(samples=pl.DataFrame(rows, schema=SAMPLES))


def long_tailed(rng: np.random.Generator) -> Trace:
    """Length is chance: the case that racing distorts."""
    lengths = np.exp(rng.normal(6.0, 1.1, (128, 8)))
    return trace_of(np.clip(lengths, 1, 8000).astype(int), cap=8000)


def near_the_cap(rng: np.random.Generator) -> Trace:
    """Length is the prompt's, and half of the prompts fill the cap."""
    own = rng.normal(7000.0, 1500.0, (128, 1))
    return trace_of(np.clip(own + rng.normal(0, 200, (128, 8)), 1, 8000).astype(int), cap=8000)


def run(trace: Trace, steps: int = 5) -> est.Estimate:
    job = est.on_paper_gpus(trace.tasks[0], of_trace(trace))
    return est.estimate(job, trace, steps=steps)


@pytest.fixture(scope="module")
def tailed() -> est.Estimate:
    return run(long_tailed(np.random.default_rng(0)))


def test_a_long_tail_gains_and_racing_shortens_what_is_kept(tailed: est.Estimate) -> None:
    found = tailed
    assert found.icc == pytest.approx(0.0, abs=0.1)
    assert (found.prompts, found.responses) == (32, 8)
    assert found.modes["off"].speedup == 1.0
    assert found.modes["race"].speedup > 1.2
    assert found.modes["race"].kept_vs_true_len < 0.9
    assert found.modes["exact"].kept_vs_true_len == pytest.approx(1.0)
    assert found.recommended != "race"
    chosen = found.modes[found.recommended]
    assert chosen.kept_vs_true_len >= 0.95
    assert chosen.speedup > 1.05
    assert any("race" in sentence for sentence in found.sentences)


def test_what_decoding_ahead_would_add_is_said(tailed: est.Estimate) -> None:
    gains = [mode.speedup for mode in tailed.ahead.values()]
    assert [*tailed.ahead] == ["1.5", "2.0", "2.5"]
    assert tailed.modes["exact"].speedup < gains[0] < gains[1] < gains[2]
    assert all(mode.kept_vs_true_len == pytest.approx(1.0) for mode in tailed.ahead.values())
    assert "assumed" in tailed.ahead_from
    assert f"{gains[1]:.2f}x at 2.0" in " ".join(tailed.sentences)
    ahead = (f"exact, ahead {each}" for each in tailed.ahead)
    assert [*tailed.rows] == [*tailed.modes, "partial", *ahead]


@pytest.mark.wide
def test_it_is_said_too_where_the_run_had_switched_it_off() -> None:
    trace = near_the_cap(np.random.default_rng(1))
    job = est.on_paper_gpus("made", of_trace(trace))
    off = SpeculationConfig(mode="off")
    plain = replace(job, rollout=job.rollout.model_copy(update={"speculation": off}))
    found, same = est.estimate(plain, trace, steps=2), est.estimate(job, trace, steps=2)
    assert {t: m.step_s for t, m in found.ahead.items()} == {
        t: m.step_s for t, m in same.ahead.items()
    }


def test_costs_that_were_measured_with_drafts_have_it_already() -> None:
    trace = near_the_cap(np.random.default_rng(1))
    job = est.on_paper_gpus("made", of_trace(trace))
    costs = job.calibration.model_copy(update={"ahead": Ahead(tokens=2.0)})
    drafting = replace(job, calibration=costs)
    found, plain = est.estimate(drafting, trace, steps=2), est.estimate(job, trace, steps=2)
    assert found.ahead == {}
    assert found.modes["off"].step_s == plain.modes["off"].step_s
    assert found.modes["exact"].step_s == plain.ahead["2.0"].step_s


@pytest.mark.wide
def test_near_the_cap_nothing_is_raced() -> None:
    found = run(near_the_cap(np.random.default_rng(1)))
    assert found.icc == pytest.approx(0.95, abs=0.05)
    assert found.recommended in ("exact", "off")
    assert found.modes["race"].speedup < 1.05 * found.modes["exact"].speedup
    assert found.sentences[0].startswith("Racing does not pay")


def test_the_recorded_prompts_come_first() -> None:
    lengths = np.arange(1, 257).reshape(32, 8)
    source = of_trace(trace_of(lengths, cap=300))
    assert [r.lengths.tolist() for r in source.recorded] == lengths.tolist()
    assert source.cap == 300
    assert source.prompt_tokens == 100


def test_what_a_prompt_shares_follows_its_responses() -> None:
    rng = np.random.default_rng(2)
    own = rng.normal(0, 1, (200, 1))
    lengths = np.exp(6.0 + own + 0.5 * rng.normal(size=(200, 8))).astype(int)
    source = of_trace(trace_of(lengths, cap=100_000))
    traits = np.array([r.traits[0, 0] for r in source.recorded])
    assert np.corrcoef(traits, own[:, 0])[0, 1] > 0.9
    assert traits.std() == pytest.approx(1.0, abs=0.15)


def mode(speedup: float, kept: float = 1.0) -> ModeEstimate:
    return ModeEstimate(speedup=speedup, kept_vs_true_len=kept, step_s=1.0, decoded_vs_kept=1.0)


@pytest.mark.parametrize(
    ("exact", "prompts", "race", "expected"),
    [
        (mode(1.2), mode(1.5, 0.96), mode(1.9, 0.8), "prompts"),
        (mode(1.2), mode(1.5, 0.94), mode(1.9, 0.8), "exact"),
        (mode(1.2), mode(1.21, 0.99), mode(1.22, 0.97), "exact"),
        (mode(0.99), mode(0.9), mode(0.9), "exact"),
        (mode(0.9), mode(0.9), mode(0.9), "off"),
        (mode(0.9), mode(1.3, 0.97), mode(1.4, 0.96), "race"),
    ],
)
def test_recommendation(
    exact: ModeEstimate, prompts: ModeEstimate, race: ModeEstimate, expected: str
) -> None:
    modes = {"off": mode(1.0), "exact": exact, "prompts": prompts, "race": race}
    assert recommend(modes, 0.95) == expected


@pytest.mark.parametrize(("speedup", "tempting"), [(1.015, False), (1.2, True)])
def test_a_race_tempts_where_it_beats_synchronous_rounds_too(
    speedup: float, tempting: bool
) -> None:
    """And not only the mode to use, which may be a little slower than those."""
    slow = mode(0.9)
    modes = {"off": mode(1.0), "exact": mode(0.985), "prompts": slow, "race": mode(speedup, 0.8)}
    told = sentences(
        modes, "exact", ahead={}, left_out="nothing", depends=None, read=999, limit=0.95
    )
    assert any("race would be faster" in sentence for sentence in told) == tempting


@pytest.mark.parametrize(
    ("read", "cause"),
    [
        ((0.16, 0.27), " since length is only partly a property of the prompt."),
        ((0.06, 0.1), " since length is mostly chance, hardly a property of the prompt."),
        ((0.8, 0.8), " of the true mean length."),
        ((None, None), " of the true mean length."),
    ],
)
def test_why_a_race_is_biased_is_said_as_of_the_trace(
    read: tuple[float | None, float | None], cause: str
) -> None:
    modes = {"off": mode(1.0), "exact": mode(1.1), "prompts": mode(1.0), "race": mode(1.3, 0.8)}
    told = sentences(
        modes,
        "exact",
        ahead={},
        left_out="nothing",
        depends=dependence(*read),
        read=999,
        limit=0.95,
    )
    assert any(line.startswith("Mode race would") and line.endswith(cause) for line in told)


def test_what_does_not_pay_is_not_said_to_tempt() -> None:
    modes = {"off": mode(1.0), "exact": mode(1.03), "prompts": mode(1.0), "race": mode(1.07, 0.8)}

    def told(read: int) -> list[str]:
        return sentences(
            modes, "exact", ahead={}, left_out="it", depends=None, read=read, limit=0.95
        )

    assert [line.split(" ", 3)[:3] for line in told(100)] == [
        ["Racing", "does", "not"],
        ["Use", "exact:", "about"],
    ]
    assert "Only 99 finished responses were read" in told(99)[1]


def test_lengths_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="all responses of the trace are empty"):
        of_trace(trace_of(np.zeros((4, 8), np.int64), cap=300))


def test_aborted_responses_are_said_to_be_missing() -> None:
    trace = long_tailed(np.random.default_rng(3))
    raced = trace.samples.with_columns(
        state=pl.when(pl.col("index") == 7).then(pl.lit("aborted")).otherwise("state")
    )
    found = run(Trace(samples=raced), steps=2)
    assert found.responses == 7
    assert "aborted" in found.sentences[-1]


def test_several_tasks_need_a_choice() -> None:
    one = trace_of(np.full((4, 2), 5), cap=10, task="one").samples
    two = trace_of(np.full((4, 2), 5), cap=10, task="two").samples
    both = Trace(samples=pl.concat([one, two]))
    with pytest.raises(ValueError, match="one, two"):
        of_trace(both)
    assert of_trace(both, "two").prompts == 1
    with pytest.raises(ValueError, match="not in the trace"):
        of_trace(both, "three")


def test_the_machine_grows_with_the_step() -> None:
    small = of_trace(trace_of(np.full((32, 8), 900), cap=1000))
    large = of_trace(trace_of(np.full((1024, 8), 900), cap=1000))
    assert est.on_paper_gpus("made", small).gpus == 8
    assert est.on_paper_gpus("made", large).gpus == 32
    assert est.on_paper_gpus("made", large, est.EstimatedMachine(gpus=16)).gpus == 16
    huge = est.on_paper_gpus("made", of_trace(trace_of(np.full((2400, 8), 9), cap=10)))
    assert huge.rollout.prompts_per_step * 8 <= 2400
    assert "50% of a step" in huge.costs
    with pytest.raises(ValueError, match="no such calibration"):
        est.on_paper_gpus("made", small, est.EstimatedMachine(calibration="paper-of-nobody"))
    assert (FOLDER / "paper-7b-8k.yaml").is_file()


def test_a_page_is_written(tailed: est.Estimate, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    from rollpacker.report.estimate_report import write_estimate_report

    page = write_estimate_report(tailed, tmp_path / "made" / "estimate.html")
    text = page.read_text(encoding="utf-8")
    assert tailed.sentences[0] in text
    assert "http" not in text.split("<script")[0]
