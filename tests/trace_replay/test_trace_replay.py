"""``rollpacker trace replay``: forced lengths, slept latencies, phases, and bad input."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollpacker.cli import main
from rollpacker.config import FakeEngineConfig
from rollpacker.demo.model import build_tokenizer
from rollpacker.engine.compiling import COMPILING
from rollpacker.engine.fake import FakeEngine
from rollpacker.polytrace import formats
from rollpacker.polytrace.formats.ours.native import concat
from rollpacker.polytrace.model.turns import Scale
from rollpacker.polytrace.model.turns import TraceResponse as Response
from rollpacker.polytrace.model.turns import TraceTurn as Turn
from rollpacker.polytrace.model.workload import generate, load_model
from rollpacker.polytrace.schema import REWARD_BATCHES, SAMPLES, Trace, TraceError
from rollpacker.trace_replay.engine import build_engine
from rollpacker.trace_replay.plan import StepPlan, plan
from rollpacker.trace_replay.replayer import Replayer

Call = Callable[..., tuple[int, str, str]]
SHARED = os.environ.get("ROLLPACKER_POLYTRACE")


class Ticking:
    """A clock that only sleeping and decoding move."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


class Timed(FakeEngine):
    """A decode step takes a second."""

    def __init__(self, clock: Ticking, concurrency: int) -> None:
        super().__init__(FakeEngineConfig(), concurrency=concurrency)
        self._clock = clock

    def step(self):
        self._clock.seconds += 1.0
        return super().step()


def timed(step: StepPlan, concurrency: int = 0):
    clock = Ticking()
    engine = Timed(clock, concurrency)
    return Replayer(engine, vocabulary=9, now=clock.now, sleep=clock.sleep).run(step)


def one(*turns: Turn, reward_s: float = 0.0) -> tuple[Response, ...]:
    return (Response(turns=turns, reward_s=reward_s),)


def step_of(*groups: tuple[Response, ...], batch_reward_s: float = 0.0) -> StepPlan:
    return StepPlan(step=3, groups=groups, batch_reward_s=batch_reward_s)


SEARCH = (Turn(prompt=4, tokens=3, tool_s=10.0), Turn(prompt=9, tokens=2))


def test_a_tool_that_nobody_else_hides_is_waited_for() -> None:
    found = timed(step_of(one(*SEARCH)))
    assert (found.rollout_s, found.tool_wait_s, found.reward_s) == (15.0, 10.0, 0.0)
    assert (found.turns, found.generated_tokens, found.decode_steps) == (2, 5, 5)
    assert found.context_tokens == found.prefill_tokens == 13


def test_tools_do_not_hold_up_other_conversations() -> None:
    found = timed(step_of(one(*SEARCH), one(Turn(prompt=4, tokens=20))))
    assert (found.rollout_s, found.tool_wait_s, found.decode_steps) == (20.0, 0.0, 20)
    assert found.peak_running == 2


def test_the_last_turns_tool_belongs_to_the_rollout() -> None:
    found = timed(step_of(one(Turn(prompt=1, tokens=2, tool_s=5.0))))
    assert (found.rollout_s, found.tool_wait_s) == (7.0, 5.0)


def test_rewards_are_a_phase_of_their_own() -> None:
    early, late = one(Turn(prompt=1, tokens=2), reward_s=7.0), one(Turn(prompt=1, tokens=5))
    found = timed(step_of(early, late))
    assert (found.rollout_s, found.reward_s, found.step_s) == (5.0, 4.0, 9.0)
    found = timed(step_of(one(Turn(prompt=1, tokens=9)), one(Turn(prompt=1, tokens=1), reward_s=3)))
    assert (found.rollout_s, found.reward_s) == (9.0, 0.0)
    found = timed(step_of(late, batch_reward_s=6.0))
    assert (found.rollout_s, found.reward_s) == (5.0, 6.0)


def test_turns_that_generate_nothing_are_passed_over() -> None:
    found = timed(step_of(one(Turn(prompt=3, tokens=0, tool_s=2.0), Turn(prompt=5, tokens=4))))
    assert (found.rollout_s, found.tool_wait_s, found.generated_tokens) == (6.0, 2.0, 4)
    assert timed(step_of(one(Turn(prompt=3, tokens=0)))).step_s == 0.0


turns = st.builds(
    Turn,
    prompt=st.integers(1, 30),
    tokens=st.integers(0, 6),
    tool_s=st.sampled_from([0.0, 0.5, 4.0]),
)
answers = st.builds(
    Response,
    turns=st.lists(turns, min_size=1, max_size=3).map(tuple),
    reward_s=st.sampled_from([0.0, 1.5]),
)
groups = st.lists(st.lists(answers, min_size=1, max_size=3).map(tuple), min_size=1, max_size=4)


@given(groups=groups, concurrency=st.integers(1, 5))
def test_any_plan_is_replayed_exactly(groups: list[Any], concurrency: int) -> None:
    step = step_of(*groups)
    found = timed(step, concurrency)
    assert found.generated_tokens == sum(turn.tokens for turn in step.turns)
    assert found.peak_running <= concurrency
    assert found.rollout_s >= max(
        sum(turn.tokens + turn.tool_s for turn in response.turns) for response in step.responses
    )
    assert found.rollout_s == pytest.approx(found.decode_steps + found.tool_wait_s)
    assert 0.0 <= found.reward_s <= 1.5


# From a trace to a plan -----------------------------------------------------------------------


def trace_of(*rows: dict[str, Any], batches: list[dict[str, Any]] | None = None) -> Trace:
    base = {"task": "t", "step": 0, "index": 0, "prompt_tokens": 10, "state": "kept"}
    return Trace(
        samples=pl.DataFrame([dict.fromkeys(SAMPLES) | base | row for row in rows], schema=SAMPLES),
        reward_batches=pl.DataFrame(batches or [], schema=REWARD_BATCHES),
    )


def planned(trace: Trace, **options: Any) -> tuple[list[StepPlan], list[str]]:
    notes: list[str] = []
    return plan(trace, "t", note=notes.append, **options), notes


def call_of(turn: int | None, latency_s: float) -> dict[str, Any]:
    return {"turn": turn, "latency_s": latency_s, "tokens": 5}


def test_lengths_and_latencies_are_scaled() -> None:
    turns = [
        {"prompt_tokens": 100, "cached_tokens": 0, "completion_tokens": 3},
        {"prompt_tokens": 205, "cached_tokens": 80, "completion_tokens": 55},
    ]
    tools = [call_of(0, 1.0), call_of(0, 4.0)]
    row = {"prompt": "a", "response_tokens": 58, "turns": turns, "tools": tools, "reward_s": 6.0}
    (step,), _ = planned(trace_of(row), scale=Scale(tokens=0.1, time=0.5))
    assert step.responses == [
        Response(
            turns=(
                Turn(prompt=10, tokens=1, tool_s=2.0),
                Turn(prompt=20, tokens=6, cached=8),
            ),
            reward_s=3.0,
        )
    ]
    assert step.longest == 26


def test_contexts_that_were_not_recorded_grow_by_what_is_added() -> None:
    turns = [{"completion_tokens": 3}, {"completion_tokens": 4}]
    row = {"prompt": "a", "response_tokens": 7, "turns": turns, "tools": [call_of(None, 1.0)]}
    (step,), _ = planned(trace_of(row))
    assert [(turn.prompt, turn.tool_s) for turn in step.turns] == [(10, 1.0), (18, 0.0)]


def test_aborted_responses_are_left_out_and_steps_are_chosen() -> None:
    rows = [{"prompt": "a", "step": step, "response_tokens": 4} for step in (5, 2, 9)]
    aborted = {"prompt": "b", "step": 2, "response_tokens": 4, "state": "aborted"}
    batches = [
        {"task": "t", "step": 2, "dp_rank": rank, "reward_time_s": 3.0 + rank} for rank in (0, 1)
    ]
    steps, notes = planned(trace_of(*rows, aborted, batches=batches), steps=2)
    found = [(step.step, len(step.responses), step.batch_reward_s) for step in steps]
    assert found == [(2, 1, 4.0), (5, 1, 0.0)]
    assert notes == ["t: 1 aborted responses are left out: their true length is not known"]
    with pytest.raises(TraceError, match="no whole response"):
        planned(trace_of(aborted))


# On the built-in engine -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay") / "model"
    torch.manual_seed(3)
    tokenizer = build_tokenizer()
    shape = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        eos_token_id=1,
    )
    Qwen2ForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def mini(checkpoint: Path, step: StepPlan) -> Replayer:
    engine, vocabulary = build_engine("mini", str(checkpoint), [step], concurrency=8)
    return Replayer(engine, vocabulary=vocabulary)


def test_groups_share_their_prompt_and_later_turns_too(checkpoint: Path) -> None:
    quick = Response(turns=(Turn(prompt=40, tokens=5), Turn(prompt=60, tokens=7)))
    slow = Response(turns=(Turn(prompt=40, tokens=50),))
    step = step_of((slow, quick, quick))
    found = mini(checkpoint, step).run(step)
    assert found.generated_tokens == 50 + 12 + 12
    assert found.context_tokens == 3 * 40 + 2 * 60
    # The prompt once; the first turn is there for the second one but for its last token.
    assert (found.prefill_tokens, found.kept_tokens) == (40 + 2 * (60 - 44), 2 * 44)
    assert (found.peak_running, found.preemptions, found.decode_steps) == (3, 0, 50)


def test_a_context_that_shrinks_is_a_prompt_of_its_own(checkpoint: Path) -> None:
    step = step_of(one(Turn(prompt=40, tokens=5), Turn(prompt=9, tokens=3)))
    found = mini(checkpoint, step).run(step)
    assert (found.generated_tokens, found.prefill_tokens) == (8, 49)


@settings(max_examples=settings().max_examples // 5)
@given(groups=groups, concurrency=st.integers(1, 5))
def test_the_built_in_engine_keeps_to_any_plan(
    checkpoint: Path, groups: list[Any], concurrency: int
) -> None:
    clock, step = Ticking(), step_of(*groups)
    engine, ids = build_engine("mini", str(checkpoint), [step], concurrency=concurrency)
    found = Replayer(engine, vocabulary=ids, now=clock.now, sleep=clock.sleep).run(step)
    assert found.generated_tokens == sum(turn.tokens for turn in step.turns)
    assert found.prefill_tokens <= found.context_tokens
    assert found.peak_running <= concurrency
    assert not engine.busy()


# The verb -------------------------------------------------------------------------------------


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run ``rollpacker trace`` as its entry point does: exit code, standard output and error."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rollpacker", "trace", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return run


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "search.parquet"
    made = generate(load_model("search"), steps=3, prompts=4, responses=4, seed=4)
    formats.write(made, path, "native")
    return path


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_replay_writes_what_compare_reads(
    call: Call, search: Path, checkpoint: Path, tmp_path: Path
) -> None:
    real, simulated = tmp_path / "new" / "real.jsonl", tmp_path / "simulated.jsonl"
    scaled = ("--steps", 2, "--max-tokens-scale", 0.03, "--time-scale", 0.05)
    code, out, err = call("replay", search, "--model", checkpoint, *scaled, "--out", real, "--json")
    assert (code, err.replace(f"note: {COMPILING}\n", "")) == (0, "")
    found = json.loads(out)
    assert found["steps"] == lines(real)
    assert [row["step"] for row in found["steps"]] == [0, 1]
    samples = formats.read(search).samples.filter(pl.col("step") < 2)
    tokens = [
        max(1, round(0.03 * turn["completion_tokens"])) for row in samples["turns"] for turn in row
    ]
    assert found["total"]["generated_tokens"] == sum(tokens)
    assert found["total"]["turns"] == len(tokens)
    assert any("every length is 0.03 of the recorded one" in note for note in found["notes"])
    for row in found["steps"]:
        assert row["step_s"] == pytest.approx(row["rollout_s"] + row["reward_s"])
        assert 0.0 <= row["tool_wait_s"] < row["rollout_s"]  # 0: decoding is as slow as tools
        assert row["prefill_tokens"] < row["context_tokens"]
        assert row["rates"]["tokens_per_s"] == row["generated_tokens"] / row["rollout_s"]

    code, out, _ = call("replay", search, "--simulate", *scaled, "--out", simulated, "--json")
    assert code == 0
    predicted = json.loads(out)
    for ours, theirs in zip(predicted["steps"], found["steps"], strict=True):
        assert ours["generated_tokens"] == theirs["generated_tokens"]
    code, out, _ = call("compare", simulated, real, "--json")
    assert code == 0
    assert set(json.loads(out)["phases"]) == {"rollout", "reward", "tool_wait"}
    code, out, _ = call("compare", real, real, "--json")
    assert set(json.loads(out)["phases"]) == {"rollout", "reward", "tool_wait"}


def test_the_table_says_what_was_scaled(call: Call, search: Path) -> None:
    words = ("--engine", "fake", "--time-scale", 0, "--max-tokens-scale", 0.5)
    code, out, err = call("replay", search, *words)
    assert code == 0
    assert "tool wait s" in out
    assert "scaled" not in out
    assert "every length is 0.5 of the recorded one, including prompts" in err
    assert "tools and rewards take 0 of their recorded seconds" in err
    assert "the engine 'fake' shares no prefixes" in err


def test_simulated_rewards_are_the_traces_own(call: Call, tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{number // 2}", "index": number % 2, "response_tokens": 100, "reward_s": 30.0}
        for number in range(4)
    ]
    path = tmp_path / "graded.parquet"
    formats.write(trace_of(*rows), path, "native")
    code, out, _ = call("replay", path, "--simulate", "--gpus", 1, "--json")
    assert code == 0
    (step,) = json.loads(out)["steps"]
    assert step["reward_s"] == pytest.approx(30.0)
    assert step["generated_tokens"] == 400


def refused(call: Call, *words: object) -> str:
    code, out, err = call("replay", *words)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1, err
    return err


def test_a_context_that_is_too_short_names_the_flag(
    call: Call, search: Path, checkpoint: Path
) -> None:
    err = refused(call, search, "--model", checkpoint)
    assert "has a context of 256: use --max-tokens-scale 0." in err
    fits = err.partition("--max-tokens-scale ")[2].partition(" ")[0]
    words = ("--max-tokens-scale", fits, "--steps", 3, "--time-scale", 0)
    assert call("replay", search, "--model", checkpoint, *words)[0] == 0


def test_bad_input_is_one_line(call: Call, search: Path, checkpoint: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.parquet"
    formats.write(trace_of(), empty, "native")
    two = tmp_path / "two.parquet"
    made = [generate(load_model(name), steps=1, prompts=1) for name in ("math", "code")]
    formats.write(concat(made), two, "native")
    assert "no responses in it" in refused(call, empty, "--engine", "fake")
    assert "no task 'serch' (did you mean 'search'?)" in refused(call, search, "--task", "serch")
    assert "name one with --task: math, code" in refused(call, two, "--engine", "fake")
    assert "the engine 'mini' needs a checkpoint" in refused(call, search)
    assert "there is no such folder" in refused(call, search, "--model", tmp_path / "none")
    for words, said in (
        (("--steps", 0), "--steps 0: must be at least 1"),
        (("--concurrency", 0), "--concurrency 0: must be at least 1"),
        (("--time-scale", -1), "--time-scale -1.0: must be 0 or more"),
        (("--max-tokens-scale", 0), "--max-tokens-scale 0.0: must be more than 0"),
        (("--out", "x.json"), "JSON lines"),
        (("--calibration", "paper-7b-8k"), "need --simulate"),
        (("--simulate", "--calibration", "paper-7b"), "no such calibration file"),
        (("--simulate", "--gpus", 3, "--calibration", "paper-32b-32k"), "gpus=3 do not divide"),
    ):
        assert said in refused(call, search, "--engine", "fake", *words)


@pytest.mark.skipif(SHARED is None, reason="ROLLPACKER_POLYTRACE is not set")
def test_a_public_trace_is_replayed_token_by_token(call: Call) -> None:
    folder = Path(SHARED or "") / "search_r1_7b"
    code, out, _ = call("replay", folder, "--engine", "fake", "--time-scale", 0, "--json")
    assert code == 0
    total = json.loads(out)["total"]
    samples = formats.read(folder).samples
    assert total["responses"] == samples.height == 960
    assert total["generated_tokens"] == samples["response_tokens"].sum()
