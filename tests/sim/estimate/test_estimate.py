"""Estimates of tail batching's gain on somebody's own lengths."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from rollpacker.config.rollout import SpeculationConfig
from rollpacker.polytrace.schema import SAMPLES, Trace
from rollpacker.polytrace.statistics import dependence
from rollpacker.sim import estimate as est
from rollpacker.sim.costs.calibration import FOLDER
from rollpacker.sim.costs.costs import Ahead
from rollpacker.sim.estimate import AHEAD, ModeEstimate, recommend, sentences
from rollpacker.sim.workload.source import of_trace
from rollpacker.sim.world.machines import machine_of
from rollpacker.sim.world.simulator import Simulation


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
    job = est.on_paper_gpus(
        trace.tasks[0], of_trace(trace), est.EstimatedMachine(calibration="paper-7b-8k")
    )
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
    ahead = tailed.modes[AHEAD]
    assert [*tailed.modes] == [*est.MODES, "partial", AHEAD]
    assert tailed.modes["exact"].speedup < ahead.speedup
    assert ahead.kept_vs_true_len == pytest.approx(1.0)
    assert tailed.costs["tokens of a step ahead"].startswith("1.5 to 2.5, assumed")
    assert f"may make exact {ahead.range}" in " ".join(tailed.sentences)


def test_a_row_is_what_the_mode_does_where_the_engines_decode_ahead() -> None:
    """``exact`` of their log does, wherever the drafts are from; ``off`` does not."""
    trace = near_the_cap(np.random.default_rng(1))
    job = est.on_paper_gpus(
        "made", of_trace(trace), est.EstimatedMachine(calibration="paper-7b-8k")
    )
    tokens = est.DraftCases(cases=(Ahead(tokens=2.0),), source="measured")
    plain = est.estimate(replace(job, drafts=tokens), trace, steps=1)
    off = job.rollout.model_copy(update={"speculation": SpeculationConfig(mode="off")})
    switched = est.estimate(replace(job, drafts=tokens, rollout=off), trace, steps=1)
    costs = job.cases[0].calibration.model_copy(update={"ahead": Ahead(tokens=2.0)})
    measured = replace(job, cases=(replace(job.cases[0], calibration=costs),))
    assert switched.modes[AHEAD] == plain.modes[AHEAD]
    for own in (replace(job, drafts=tokens, ahead=True), measured):
        found = est.estimate(own, trace, steps=1)
        assert found.modes["exact"] == plain.modes[AHEAD]
        assert found.modes["off"] == plain.modes["off"]
        assert AHEAD not in found.modes


@pytest.mark.wide
def test_near_the_cap_nothing_is_raced() -> None:
    found = run(near_the_cap(np.random.default_rng(1)))
    assert found.icc == pytest.approx(0.95, abs=0.05)
    assert found.recommended in ("exact", "off")
    assert found.modes["race"].speedup < 1.05 * found.modes["exact"].speedup
    assert found.sentences[0].startswith("Racing does not pay")


def test_a_range_is_around_what_jobs_say_in_the_middle(tailed: est.Estimate) -> None:
    off, *others = tailed.modes.values()
    assert (off.low, off.speedup, off.high) == (1.0, 1.0, 1.0)
    for each in others:
        assert each.low < each.speedup < each.high
        assert each.high / each.speedup == pytest.approx(each.speedup / each.low)


def test_one_response_moves_the_assumed_costs_by_little() -> None:
    """Beyond the length at which the nearest setting is another one."""
    lengths = np.exp(np.random.default_rng(5).normal(6.0, 1.1, (64, 8))).clip(1, 8000).astype(int)
    longer = lengths.copy()
    longer[0, 0] = 9500
    weights = []
    for each in (lengths, longer):
        cases = est.on_paper_gpus("made", of_trace(trace_of(each, cap=20_000))).cases
        weights.append(np.array([c.weight for c in cases]) / sum(c.weight for c in cases))
        names = [case.calibration.name for case in cases]
        assert names == ["paper-7b-8k", "paper-14b-16k", "paper-32b-32k"]
    assert weights[0] == pytest.approx(weights[1], abs=0.03)


def test_costs_that_cannot_run_the_job_are_left_out() -> None:
    source = of_trace(trace_of(np.full((32, 8), 900), cap=1000))
    names = {
        gpus: [
            case.calibration.name
            for case in est.on_paper_gpus("made", source, est.EstimatedMachine(gpus=gpus)).cases
        ]
        for gpus in (1, 3)
    }
    assert names == {1: ["paper-7b-8k", "paper-14b-16k"], 3: ["paper-7b-8k", "paper-14b-16k"]}
    too_large = est.EstimatedMachine(gpus=1, calibration="paper-32b-32k")
    with pytest.raises(ValueError, match="fit into no tensor-parallel group"):
        est.on_paper_gpus("made", source, too_large)


def test_one_gpu_has_replicas_of_one() -> None:
    source = of_trace(trace_of(np.full((32, 8), 900), cap=1000))
    job = est.on_paper_gpus("made", source, est.EstimatedMachine(gpus=1, model="Qwen2.5-0.5B"))
    costs = job.cases[0].calibration
    assert (costs.train_gpus, costs.rollout_tp) == (1, 1)
    assert any("speed-ups are too small" in text for text in job.costs.values())


def test_steps_are_drawn_anew_as_they_were() -> None:
    lengths = np.arange(1, 257).reshape(32, 8)
    source = of_trace(trace_of(lengths, cap=300, steps=8))
    again = source.drawn_again(np.random.default_rng(0), prompts=4, steps=60)
    assert len(again.recorded) == 240
    steps = [
        tuple(int(r.lengths[0]) for r in again.recorded[at : at + 4]) for at in range(0, 240, 4)
    ]
    whole = {tuple(lengths[at : at + 4, 0].tolist()) for at in range(0, 32, 4)}
    assert whole < set(steps)
    assert len(set(steps) - whole) == 1  # what the model draws


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


def mode(speedup: float, kept: float = 1.0, reach: float = 1.0) -> ModeEstimate:
    return ModeEstimate(
        speedup=speedup,
        low=speedup / reach,
        high=speedup * reach,
        kept_vs_true_len=kept,
        step_s=1.0,
        decoded_vs_kept=1.0,
    )


@pytest.mark.parametrize(
    ("exact", "auto", "prompts", "race", "expected"),
    [
        (mode(1.2), mode(1.3), mode(1.5, 0.96), mode(1.9, 0.8), "prompts"),
        (mode(1.2), mode(1.2), mode(1.5, 0.94), mode(1.9, 0.8), "exact"),
        (mode(1.38, 1.0, 1.05), mode(1.41, 0.99, 1.05), mode(1.5, 0.9), mode(1.7, 0.8), "exact"),
        (mode(1.2, 1.0, 1.05), mode(1.4, 0.97, 1.05), mode(1.5, 0.96, 1.05), mode(1.8), "race"),
        (mode(1.2, 1.0, 1.05), mode(1.4, 0.97, 1.05), mode(1.5, 0.96, 1.05), mode(1.3), "auto"),
        (mode(1.01, 1.0, 1.05), mode(0.9), mode(0.9), mode(0.9), "off"),
        (mode(0.9, 1.0, 1.05), mode(0.9), mode(0.9), mode(0.9), "off"),
    ],
)
def test_the_simplest_mode_that_is_not_clearly_beaten(
    exact: ModeEstimate,
    auto: ModeEstimate,
    prompts: ModeEstimate,
    race: ModeEstimate,
    expected: str,
) -> None:
    modes = {"off": mode(1.0), "exact": exact, "auto": auto, "prompts": prompts, "race": race}
    assert recommend(modes, 0.95) == expected


def told(race: ModeEstimate, exact: float, read: int = 999, depends: Any = None) -> list[str]:
    modes = {"off": mode(1.0), "exact": mode(exact), "prompts": mode(0.9), "race": race}
    return sentences(modes, "exact", left_out="it", depends=depends, read=read, limit=0.95)


def test_nobody_is_told_that_a_fast_race_is_slow_where_only_races_were_simulated() -> None:
    modes = {"off": mode(1.0), "race": mode(1.8, 0.76)}
    assert recommend(modes, 0.95) == "off"
    said = sentences(modes, "off", left_out="it", depends=None, read=999, limit=0.95)
    assert (
        said[0] == "No on-policy mode of these keeps 0.95 of the true mean length (left out: it)."
    )
    assert "race may be faster" in said[1]


@pytest.mark.parametrize(("speedup", "tempting"), [(1.015, False), (1.2, True)])
def test_a_race_tempts_where_it_beats_synchronous_rounds_too(
    speedup: float, tempting: bool
) -> None:
    """And not only the mode to use, which may be a little slower than those."""
    said = told(mode(speedup, 0.8), 0.95)
    assert any("race may be faster" in sentence for sentence in said) == tempting


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
    said = told(mode(1.3, 0.8), 1.1, depends=dependence(*read))
    assert any(line.startswith("Mode race may") and line.endswith(cause) for line in said)


def test_what_does_not_pay_is_not_said_to_tempt() -> None:
    race = mode(1.07, 0.8)
    assert [line.split(" ", 3)[:3] for line in told(race, 1.03, read=100)] == [
        ["Racing", "does", "not"],
        ["Use", "exact:", "1.03x"],
    ]
    assert "Only 99 finished responses were read" in told(race, 1.03, read=99)[1]


def test_nothing_that_is_no_bound_is_called_one(tailed: est.Estimate) -> None:
    words = " ".join((*tailed.sentences, *tailed.costs.values()))
    assert not [word for word in ("at most", "bound", "at least") if word in words]


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
    large = of_trace(trace_of(np.full((128, 8), 900), cap=1000, steps=1))
    assert est.on_paper_gpus("made", small).cases[0].gpus == 8
    assert est.on_paper_gpus("made", large).cases[0].gpus == 16
    assert est.on_paper_gpus("made", large, est.EstimatedMachine(gpus=32)).cases[0].gpus == 32
    huge = est.on_paper_gpus("made", of_trace(trace_of(np.full((260, 8), 9), cap=10, steps=1)))
    assert huge.rollout.prompts_per_step == 130
    assert huge.costs["simulated"] == "50% of a step and of its GPUs"
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


def test_a_tail_is_not_put_onto_larger_engines_without_a_planner() -> None:
    """Which runs cannot do: an estimate that did said 1.44x of an emulated 14B, not 1.07x."""
    trace = long_tailed(np.random.default_rng(0))
    job = est.on_paper_gpus(
        trace.tasks[0], of_trace(trace), est.EstimatedMachine(calibration="paper-14b-16k")
    )
    (case,) = job.cases
    sizes = [
        len(machine.sizes)
        for grows in (False, True)
        if (machine := machine_of(est.simulation_of(job, case, 2), case.calibration, grows=grows))
    ]
    assert sizes[0] == 1 < sizes[1]
    config = est.simulation_of(job, case, 5)
    larger = Simulation(config, case.calibration, job.source, grows=True).run()
    assert est.estimate(job, trace, steps=5).modes["exact"].step_s > larger.mean_step_s


def test_auto_is_said_where_it_may_be_faster_and_is_not_clearly(tailed: est.Estimate) -> None:
    modes = dict(tailed.modes)
    exact = modes["exact"]
    modes["auto"] = replace(
        exact,
        speedup=1.3 * exact.speedup,
        low=exact.low,
        high=2 * exact.high,
        kept_vs_true_len=0.97,
    )
    said = sentences(modes, "exact", left_out="x", depends=None, read=1000, limit=0.95)
    assert any("Mode auto may be faster" in line for line in said)
    said = sentences(modes, "auto", left_out="x", depends=None, read=1000, limit=0.95)
    assert not any("Mode auto may be faster" in line for line in said)
