import os
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.polytrace.model.fit import fit, goodness_of_fit
from rollpacker.polytrace.model.lengths import LengthModel
from rollpacker.polytrace.model.workload import (
    DriftModel,
    PromptModel,
    RewardModel,
    WorkloadModel,
    generate,
    load_model,
    model_names,
    save_model,
    to_json,
)
from rollpacker.polytrace.schema import REWARD_BATCHES, SAMPLES, Trace, TraceError
from rollpacker.polytrace.statistics import QuantileTable

PAPER = {size: load_model(f"paper-{size}").lengths for size in ("8k", "16k", "32k")}

FOLDER = os.environ.get("ROLLPACKER_POLYTRACE")
public = pytest.mark.skipif(FOLDER is None, reason="ROLLPACKER_POLYTRACE is not set")
SHIPPED = ["code", "math", "paper-16k", "paper-32k", "paper-8k", "search", "video"]


def workload(lengths: LengthModel, **more: object) -> WorkloadModel:
    tokens = QuantileTable(levels=(0.0, 1.0), values=(50.0, 500.0))
    prompt = PromptModel(tokens=tokens, correlation=0.6)
    settings_ = {"task": "toy", "prompt": prompt, "prompts": 64, "responses": 8}
    return WorkloadModel(**(settings_ | {"lengths": lengths} | more))


def ranks(values: pl.Series) -> np.ndarray:
    return values.rank().to_numpy()


def test_the_shipped_models() -> None:
    assert model_names() == SHIPPED
    for name in SHIPPED:
        made = generate(load_model(name), steps=2, seed=0)
        assert made.samples.schema == pl.Schema(SAMPLES)
        assert made.reward_batches.schema == pl.Schema(REWARD_BATCHES)
        assert made.tasks == [name]
    for size, model in PAPER.items():
        assert load_model(f"paper-{size}").lengths == model


@given(
    name=st.sampled_from(SHIPPED),
    steps=st.integers(1, 4),
    prompts=st.integers(1, 9),
    responses=st.integers(1, 6),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=settings().max_examples // 8)
def test_generated_traces_are_whole(
    name: str, steps: int, prompts: int, responses: int, seed: int
) -> None:
    model = load_model(name)
    one, two = (
        generate(model, steps=steps, prompts=prompts, responses=responses, seed=seed)
        for _ in range(2)
    )
    assert one.samples.equals(two.samples)
    assert one.reward_batches.equals(two.reward_batches)
    samples = one.samples
    assert samples.height == steps * prompts * responses
    assert samples["prompt"].n_unique() == steps * prompts
    assert samples.group_by("prompt").len()["len"].unique().to_list() == [responses]
    assert samples.group_by("prompt").agg(pl.col("prompt_tokens").n_unique())[
        "prompt_tokens"
    ].to_list() == [1] * (steps * prompts)
    assert samples["response_tokens"].to_numpy().min() >= 1
    if model.lengths.cap is not None:
        assert samples["response_tokens"].to_numpy().max() <= model.lengths.cap
        assert samples["truncated"].null_count() == 0


def test_another_seed_is_another_trace() -> None:
    model = load_model("math")
    one, two = (generate(model, steps=1, seed=seed).samples for seed in (0, 1))
    assert not one.equals(two)


def test_turns_add_up() -> None:
    samples = generate(load_model("search"), steps=2, prompts=50, seed=4).samples
    completions = samples.select(
        "response_tokens",
        pl.col("turns")
        .list.eval(pl.element().struct.field("completion_tokens").sum())
        .list.first()
        .alias("sum"),
        pl.col("turns").list.len().alias("turns"),
        pl.col("tools").list.len().alias("tools"),
    )
    assert (completions["sum"] == completions["response_tokens"]).all()
    assert (completions["turns"] >= 1).all()
    assert (completions["tools"] >= completions["turns"] - 1).all()
    turns = samples.explode("turns").select(pl.col("turns").struct.unnest())
    assert (turns["cached_tokens"] <= turns["prompt_tokens"]).all()
    assert (turns["cached_tokens"] >= 0).all()
    grown = samples.select(
        pl.col("turns").list.eval(pl.element().struct.field("prompt_tokens").diff().min())
    )
    assert grown.to_series().list.first().drop_nulls().min() > 0


def test_a_fit_finds_what_made_the_trace() -> None:
    made = generate(workload(PAPER["16k"]), steps=6, prompts=128, seed=5)
    found = fit(made)["toy"]
    errors = found.goodness.quantile_error
    assert max(map(abs, errors.values())) < 0.1
    assert abs(found.goodness.icc_error) < 0.03
    assert abs(found.goodness.icc_log_error) < 0.03
    assert found.goodness.ks < 0.03
    assert (found.model.prompts, found.model.responses) == (128, 8)
    assert found.model.lengths.cap == 16384
    again = generate(found.model, steps=6, seed=6).samples
    by_prompt = again.group_by("prompt").agg(
        pl.col("prompt_tokens").first(), pl.col("response_tokens").log().mean().alias("log")
    )
    source = made.samples.group_by("prompt").agg(
        pl.col("prompt_tokens").first(), pl.col("response_tokens").log().mean().alias("log")
    )
    ours, theirs = (
        np.corrcoef(ranks(each["prompt_tokens"]), ranks(each["log"]))[0, 1]
        for each in (by_prompt, source)
    )
    assert ours == pytest.approx(theirs, abs=0.1)


def test_drift_is_fitted_and_generated_again() -> None:
    body = LengthModel(median=400.0, between=0.2, within=0.3, cap=10**6)
    made = generate(workload(body, drift=DriftModel(slope=0.08, steps=8)), steps=8, seed=8)
    found = fit(made)["toy"].model
    assert found.drift.slope == pytest.approx(0.08, abs=0.01)
    assert found.drift.steps == 8
    longer = generate(found, steps=12, prompts=400, seed=9).samples
    medians = longer.group_by("step").agg(pl.col("response_tokens").median()).sort("step")
    values = medians["response_tokens"].to_numpy()
    assert values[7] / values[0] == pytest.approx(np.exp(0.08 * 7), rel=0.08)
    assert values[8:] == pytest.approx(np.full(4, values[7]), rel=0.08)


def test_rewards_are_fitted_and_generated_again() -> None:
    body = LengthModel(median=400.0, between=0.2, within=0.3, cap=10**6)
    seconds = QuantileTable(levels=(0.0, 1.0), values=(0.5, 2.0))
    rewards = RewardModel(response_s=seconds, batch_s=seconds, ranks=4, kind="code")
    made = generate(workload(body, rewards=rewards), steps=20, seed=1)
    assert made.reward_batches.height == 80
    assert made.reward_batches["batch_size"].unique().to_list() == [64 * 8 // 4]
    found = fit(made)["toy"].model.rewards
    assert found is not None
    assert (found.ranks, found.kind) == (4, "code")
    for table in (found.response_s, found.batch_s):
        assert table is not None
        assert float(table.at(0.5)) == pytest.approx(1.0, rel=0.15)


@given(
    groups=st.lists(st.lists(st.integers(1, 5000), min_size=1, max_size=4), min_size=1, max_size=8)
)
@settings(max_examples=settings().max_examples // 20)
def test_any_trace_can_be_fitted(groups: list[list[int]]) -> None:
    rows = [
        dict.fromkeys(SAMPLES)
        | {"task": "t", "step": number % 3, "prompt": str(number), "index": index}
        | {"response_tokens": tokens, "state": "kept"}
        for number, group in enumerate(groups)
        for index, tokens in enumerate(group)
    ]
    found = fit(Trace(samples=pl.DataFrame(rows, schema=SAMPLES)))["t"]
    made = generate(found.model, steps=2, seed=0).samples["response_tokens"].to_numpy()
    seen = [tokens for group in groups for tokens in group]
    assert made.min() >= min(seen) * 0.5 - 1
    assert found.goodness.responses == len(seen)


def test_models_survive_a_file(tmp_path: Path) -> None:
    for name in SHIPPED:
        model = load_model(name)
        save_model(model, tmp_path / "model.json")
        assert load_model(tmp_path / "model.json") == model


def test_wrong_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give a file or one of code, math"):
        load_model("nothing")
    file = tmp_path / "model.json"
    file.write_text(to_json(load_model("math")).replace('"rho":', '"roh":'), encoding="utf-8")
    with pytest.raises(ValueError, match="rho"):
        load_model(file)
    file.write_text(to_json(load_model("math")).replace('"version": 1', '"version": 9'))
    with pytest.raises(ValueError, match="version"):
        load_model(file)
    with pytest.raises(ValueError, match="at least 1"):
        generate(load_model("math"), steps=0)
    with pytest.raises(TraceError, match="no finished response"):
        fit(
            Trace(
                samples=generate(load_model("math"), steps=1).samples.with_columns(
                    pl.lit("aborted").alias("state")
                )
            )
        )


@public
@pytest.mark.parametrize(
    "name", ["verl_dapo_32b", "rllm_code_14b", "search_r1_7b", "verl_video_7b"]
)
def test_public_traces_are_reproduced(name: str) -> None:
    from rollpacker.polytrace.formats import read

    trace = read(Path(str(FOLDER)) / name)
    (found,) = fit(trace).values()
    for seed in (0, 1):
        good = goodness_of_fit(found.model, trace.samples, seed)
        assert max(map(abs, good.quantile_error.values())) < 0.1
        assert abs(good.mean_error) < 0.05
        assert abs(good.icc_error) < 0.03
        assert abs(good.icc_log_error) < 0.03
        assert good.ks < 0.05
