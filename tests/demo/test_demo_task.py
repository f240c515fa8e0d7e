"""The demo: its task, its model and its summary."""

import math
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollpacker.config import DataConfig
from rollpacker.data.load import load_rows
from rollpacker.demo.model import EOS_ID, PAD_ID, build_model, build_tokenizer
from rollpacker.demo.run import compare, free_folder
from rollpacker.demo.task import (
    answer_at_once,
    chain_of_thought,
    heldout_rows,
    is_heldout,
    steps,
    train_rows,
)
from rollpacker.reward.task import TaskReward

NUMBERS = st.integers(1, 99)


def pair(row) -> tuple[int, int]:
    first, second = row["metadata"]["numbers"]
    return first, second


@pytest.fixture(scope="module")
def train():
    return train_rows(size=4000, seed=3)


@pytest.fixture(scope="module")
def heldout():
    return heldout_rows(size=450, seed=0)


def test_no_heldout_pair_is_trained_on_in_either_order(train, heldout):
    held = {frozenset(pair(row)) for row in heldout}
    assert len(held) == len(heldout) == 450
    assert not held & {frozenset(pair(row)) for row in train}


def test_training_prompts_and_ids_are_distinct(train):
    assert len({row["prompt"] for row in train}) == len({row["id"] for row in train}) == 4000


def test_rows_are_a_function_of_the_seed():
    assert train_rows(50, seed=1) == train_rows(50, seed=1)
    prompts = [{row["prompt"] for row in train_rows(50, seed=seed)} for seed in (1, 2)]
    assert len(prompts[0] & prompts[1]) < 10


def test_too_many_rows_are_refused_with_the_number_that_exists():
    with pytest.raises(
        ValueError, match=r"gcd has only 1\d\d\d such problems, asked for size=5000"
    ):
        heldout_rows(size=5000)
    with pytest.raises(ValueError, match="only 415 such problems"):
        train_rows(size=500, least=32)


@given(NUMBERS, NUMBERS)
def test_the_split_ignores_order(first, second):
    assert is_heldout(first, second) == is_heldout(second, first)


@given(NUMBERS, NUMBERS)
def test_steps_keep_the_gcd_and_end_in_it(first, second):
    states = steps(first, second)
    assert {math.gcd(*state) for state in states} == {math.gcd(first, second)}
    assert states[-1] == (math.gcd(first, second),) * 2
    assert len(states) <= 99


def test_chain_of_thought_is_written_ones_digit_first():
    assert chain_of_thought(7, 21) == "70 12\n70 41\n70 70\n</think>7"
    assert answer_at_once(52, 5) == "</think>1"


def test_both_solutions_satisfy_reasoning_gym_and_truncated_ones_do_not(heldout):
    reward = TaskReward(require_think_end=True)
    for row in heldout[:40]:
        full = chain_of_thought(*pair(row))
        assert reward(full, row) == reward(answer_at_once(*pair(row)), row) == 1.0
        assert reward(full.partition("</think>")[0], row) == 0.0
        assert reward(full + "0", row) < 0.99


def test_rows_are_entries_of_the_reasoning_gym_task(heldout):
    scorer = reasoning_gym.create_dataset("gcd", size=1, seed=0)
    assert all(scorer.score_answer(row["answer"], row) == 1.0 for row in heldout)


def test_the_data_loader_takes_them_by_name():
    config = DataConfig(
        path="rollpacker.demo.task:train_rows", options={"size": 20, "seed": 5}, chat=False
    )
    rows = load_rows(config).rows
    assert [row.id for row in rows] == [row["id"] for row in train_rows(20, seed=5)]
    assert rows[0].prompt == rows[0].columns["question"]
    assert rows[0].columns["rg_task"] == "gcd"


def test_a_question_is_seven_tokens_and_decodes_to_itself():
    tokenizer = build_tokenizer()
    for row in heldout_rows(100):
        tokens = tokenizer(row["prompt"])["input_ids"]
        assert len(tokens) == 3 + sum(len(str(n)) for n in row["metadata"]["numbers"])
        assert tokenizer.decode(tokens) == row["prompt"]


def test_a_response_decodes_to_itself_without_the_end_token():
    tokenizer = build_tokenizer()
    text = chain_of_thought(84, 36)
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) == len(text) - len("</think>") + 1
    assert tokenizer.decode([*tokens, EOS_ID, PAD_ID], skip_special_tokens=True) == text


def test_the_longest_problem_fits_in_600_tokens():
    assert len(build_tokenizer()(chain_of_thought(99, 1))["input_ids"]) + 1 <= 600


def test_auto_classes_load_the_same_tokenizer_and_model(tmp_path):
    tokenizer, model = build_tokenizer(), build_model(seed=0)
    tokenizer.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    again, loaded = (
        AutoTokenizer.from_pretrained(tmp_path),
        AutoModelForCausalLM.from_pretrained(tmp_path),
    )
    row = heldout_rows(1)[0]
    text = row["prompt"] + chain_of_thought(*row["metadata"]["numbers"])
    tokens = tokenizer(text, return_tensors="pt")["input_ids"]
    assert again(text)["input_ids"] == tokens[0].tolist()
    assert again.decode(tokens[0]) == text
    assert (again.eos_token_id, again.pad_token_id) == (EOS_ID, PAD_ID)
    assert again.chat_template is None
    assert loaded.config.model_type == "qwen2"
    assert loaded.config.eos_token_id == loaded.generation_config.eos_token_id == EOS_ID
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_the_model_is_small_and_its_weights_depend_on_the_seed_alone():
    torch.manual_seed(7)
    state = torch.get_rng_state()
    first, second = build_model(seed=1), build_model(seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert 190_000 < sum(p.numel() for p in first.parameters()) < 210_000
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    other = build_model(seed=2)
    assert not torch.equal(first.get_input_embeddings().weight, other.get_input_embeddings().weight)


def test_other_families_have_its_size():
    model = build_model(0, 4, "qwen3_moe", num_experts=4, moe_intermediate_size=32)
    assert (model.config.model_type, model.config.hidden_size) == ("qwen3_moe", 128)
    assert model.config.num_experts == 4
    assert model.config.eos_token_id == EOS_ID


# What the demo says of its runs.


def summary(wall_s: float, worker_s: float, driver_s: float) -> dict[str, Any]:
    evaluation = {
        "eval/sampled_accuracy": 0.5,
        "eval/greedy_accuracy": 0.6,
        "eval/sampled_clipped_ratio": 0.0,
    }
    seconds = {"steps": wall_s, "rollout": wall_s, "decode_cpu": worker_s}
    return {
        "before": evaluation,
        "after": evaluation,
        "timing_s": seconds | {"worker_cpu": worker_s, "driver_cpu": driver_s},
        "tail": {"kept_vs_true_len": 1.0},
        "workers": 2,
        **dict.fromkeys(("decode_steps", "decoded_tokens", "kept_tokens", "prompts_trained"), 1),
    }


def test_racing_promises_no_gain_here() -> None:
    result = compare({"off": summary(7.5, 11.1, 1.6), "exact": summary(7.2, 11.2, 1.8)})
    assert result["speedup"]["wall"] == pytest.approx(7.5 / 7.2)
    assert "Racing pays if" in result["scope"]
    assert "rollpacker estimate --from" in result["scope"]


def test_a_folder_in_use_gives_way_to_the_next(tmp_path: Path) -> None:
    assert free_folder(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    assert free_folder(tmp_path / "demo") == tmp_path / "demo", "nothing is in it"
    for number, name in enumerate(("demo", "demo-2"), start=2):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "off").mkdir()
        assert free_folder(tmp_path / "demo") == tmp_path / f"demo-{number}"
