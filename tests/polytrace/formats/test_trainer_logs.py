"""Logs of other trainers: each is read with the lengths that a count by hand gives, or refused."""

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from trace_lines import dump

from rollpacker.polytrace import formats
from rollpacker.polytrace.describe import characterize, sentences
from rollpacker.polytrace.formats import detect
from rollpacker.polytrace.formats.logs import responses
from rollpacker.polytrace.formats.logs.layouts import LAYOUTS
from rollpacker.polytrace.formats.logs.texts import tokens
from rollpacker.polytrace.schema import Trace, TraceError

CASES = Path(__file__).parents[1] / "cases"
REFUSED = {"o_slime"}
PARTLY = {"t9_trunc", "t9_zero"}


def lines(*path: str) -> list[Any]:
    file = CASES.joinpath(*path)
    raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    return [json.loads(line) for line in raw.splitlines()]


def quarter(texts: list[str]) -> list[int]:
    return [math.ceil(len(text) / 4) for text in texts]


def tools() -> list[int]:
    found: list[str] = []
    for path in sorted((CASES / "t2_tools").iterdir()):
        for first, _, last in pl.read_parquet(path)["completion"].to_list():
            call = first["tool_calls"][0]["function"]
            found.append(call["name"] + call["arguments"] + last["content"])
    return quarter(found)


def of_zstd() -> list[int]:
    rows = [pl.read_ndjson(CASES / "v4_zst" / f"{step}.jsonl.zst") for step in (1, 2, 3)]
    return quarter(pl.concat(rows)["output"].to_list())


BY_HAND: dict[str, tuple[str, Callable[[], list[int]]]] = {
    "o_nemo": (
        "NeMo RL",
        lambda: quarter([each["content"][1] for each in lines("o_nemo", "train_data_step1.jsonl")]),
    ),
    "o_openrlhf": (
        "OpenRLHF",
        lambda: quarter([each["output"] for each in lines("o_openrlhf", "output.jsonl")]),
    ),
    "o_prime": (
        "prime-rl",
        lambda: [
            len(each["trajectory"][0]["tokens"]["completion_ids"])
            for each in lines("o_prime", "rollouts", "step_1", "train", "all", "traces.jsonl")
        ],
    ),
    "o_prime_tok": (
        "prime-rl",
        lambda: [
            each["loss_mask"].count(True)
            for each in lines("o_prime_tok", "token_exports", "step_1", "rank_0.jsonl")
        ],
    ),
    "o_roll": (
        "ROLL",
        lambda: quarter(lines("o_roll", "rollout_dump_data.step_1.jsonl")[0]["responses"]),
    ),
    "o_roll_board": (
        "ROLL",
        lambda: [
            len(each["response_tokens"])
            for each in lines("o_roll_board", "data_20260101_101010_001.jsonl")
        ],
    ),
    "o_skyrl": (
        "SkyRL",
        lambda: quarter([each["output_response"] for each in lines("o_skyrl", "gsm8k.jsonl")]),
    ),
    "o_wandb": (
        "TRL",
        lambda: quarter(
            [row[2] for row in lines("o_wandb", "completions_1_abc.table.json")[0]["data"]]
        ),
    ),
    "t2_tools": ("TRL", tools),
    "v4_gz": (
        "verl",
        lambda: quarter(
            [each["output"] for n in (1, 2, 3) for each in lines("v4_gz", f"{n}.jsonl.gz")]
        ),
    ),
    "v4_zst": ("verl", of_zstd),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_lengths_are_those_of_a_count_by_hand(name: str) -> None:
    title, count = BY_HAND[name]
    notes: list[str] = []
    trace = formats.read(CASES / name, note=notes.append)
    by_hand = count()
    assert trace.samples.height == len(by_hand)
    (report,) = characterize(trace).values()
    assert report.mean == pytest.approx(sum(by_hand) / len(by_hand), rel=0.01)
    assert report.max == max(by_hand)
    assert formats.problems(CASES / name) == []
    assert any(title in each for each in detect.titles(CASES / name))
    assert len(notes) == len(set(notes))


def test_what_tools_answered_is_not_generated() -> None:
    (report,) = characterize(formats.read(CASES / "t2_tools")).values()
    with_answers = 1075
    assert report.mean < with_answers / 5


@pytest.mark.parametrize("folder", sorted(CASES.iterdir()), ids=lambda path: path.name)
def test_every_case_is_read_or_refused_in_one_line(folder: Path) -> None:
    notes: list[str] = []
    if folder.name in REFUSED:
        with pytest.raises(TraceError) as error:
            formats.read(folder)
        assert "\n" not in str(error.value)
        assert "rollout_1.pt" in str(error.value)
        assert "pickle" in str(error.value)
        return
    trace = formats.read(folder, note=notes.append)
    assert all(sentences(report) for report in characterize(trace).values())
    left = [note for note in notes if "left out" in note]
    problems = formats.problems(folder)
    assert len(left) == len(problems) == (1 if folder.name in PARTLY else 0)
    if folder.name in PARTLY:
        assert str(folder / "completions_00002.parquet") in left[0]
        assert problems[0].file == folder / "completions_00002.parquet"


def test_the_rank_in_a_name_is_no_step() -> None:
    trace = formats.read(CASES / "v6_names2")
    assert trace.samples["step"].unique().sort().to_list() == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("global_step_3_rank0.jsonl", 3),
        ("rank0_step3.jsonl.gz", 3),
        ("3_rank_12.jsonl", 3),
        ("rank2-3.jsonl", 3),
        ("rollouts-00003-of-dp7.jsonl.zst", 3),
        ("train_data_step3.jsonl", 3),
        ("rollout_dump_data.step_3.jsonl", 3),
        ("completions_00003.parquet", 3),
        ("3.jsonl", 3),
        ("dump3.jsonl", 3),
        ("epoch_0_step_3.jsonl", 3),
        ("epoch0_step3_n4.jsonl", 3),
        ("rollout_7_step_3.jsonl", 3),
        ("epoch_0_3.jsonl", 3),
        ("epoch_3.jsonl", 3),
        ("rollout_2026-01-05_3.jsonl", 3),
        ("rollout_2026-01-05_1000.jsonl", 1000),
        ("rollout_20260105_123456_3.jsonl", 3),
        ("3_2026-01-05T12-34-56.jsonl", 3),
        ("20260105_000003.jsonl", 3),
        ("rollout_2026.jsonl", 2026),
        ("rollout_2026-01-05.jsonl", None),
        ("part0.jsonl", None),
        ("dump.jsonl", None),
    ],
)
def test_steps_of_names(tmp_path: Path, name: str, step: int | None) -> None:
    assert responses.in_name(tmp_path / name, numbers=True) == step


def test_sentences_of_odd_logs_are_true() -> None:
    told = {
        name: " ".join(sentences(*characterize(formats.read(CASES / name)).values()))
        for name in ("v26_onegroup", "v27_same", "v20_emptyout")
    }
    assert "one response each" not in told["v26_onegroup"]
    assert "only one prompt has several responses" in told["v26_onegroup"]
    assert "cut off" not in told["v27_same"]
    assert "one response each" not in told["v27_same"]
    assert "all responses are equally long" in told["v27_same"]
    assert "all responses are empty" in told["v20_emptyout"]


# --- forms that the cases do not have -----------------------------------------------------


def one(folder: Path, name: str, *records: dict[str, Any]) -> Trace:
    return formats.read(dump(folder / name, *records).parent)


def test_nemo_logs_lists_of_one_and_masks(tmp_path: Path) -> None:
    record = {
        "content": [["question", "answer", "observation", "more"]],
        "rewards": [0.5],
        "input_lengths": [12],
        "token_ids": [[1] * 14],
        "token_loss_mask": [[0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0]],
        "idx": 0,
    }
    row = one(tmp_path, "train_data_step7.jsonl", record).samples.row(0, named=True)
    assert (row["step"], row["response_tokens"], row["reward"]) == (7, 5, 0.5)
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x" * 8}]
    val = {"content": [said], "rewards": [1.0]}
    row = one(tmp_path / "v", "val_data_step7.jsonl", val).samples.row(0, named=True)
    assert (row["domain"], row["response_tokens"], row["prompt_tokens"]) == ("validation", 2, 1)


def test_skyrl_has_steps_in_folders_and_scores_of_tokens(tmp_path: Path) -> None:
    record = {"input_prompt": "q", "output_response": "x" * 12, "stop_reason": "length"}
    folder = tmp_path / "dumped_evals"
    for step in (3, 5):
        where = folder / f"global_step_{step}_evals"
        dump(where / "aime_2024.jsonl", record | {"score": [0.0, step], "data_source": "aime"})
        dump(where / "aggregated_results.jsonl", {"eval/all/avg_score": 1.0})
    notes: list[str] = []
    trace = formats.read(folder, note=notes.append)
    assert trace.tasks == ["dumped_evals"]
    assert trace.samples.select("step", "reward", "truncated", "domain").rows() == [
        (3, 3.0, True, "aime"),
        (5, 5.0, True, "aime"),
    ]
    assert not any("left out" in note for note in notes)
    assert formats.problems(folder) == []


def test_prime_episodes_count_masks_of_trained_agents_once(tmp_path: Path) -> None:
    def trace_of(name: str, trainable: bool) -> dict[str, Any]:
        return {
            "id": name,
            "agent": {"trainable": trainable},
            "nodes": [
                {"message": {"role": "user", "content": "q"}, "mask": [False] * 9},
                {"message": {"role": "assistant"}, "sampled": True, "mask": [False, True, True]},
                {"message": {"role": "tool", "content": "r" * 99}, "mask": [False] * 30},
                {"message": {"role": "assistant"}, "sampled": True, "mask": [True]},
            ],
            "rewards": {"right": {"score": 1.0, "weight": 2.0}, "late": None},
            "calls": [{"finish_reason": "stop"}, {"finish_reason": "length"}],
        }

    episode = {"id": "e", "task": {"key": "k"}, "env": {"id": "gsm8k"}}
    episode |= {"traces": [trace_of("a", True), trace_of("judge", False)]}
    for subset in ("all", "effective"):
        dump(tmp_path / "rollouts" / "step_4" / "train" / subset / "traces.jsonl", episode)
    relay = {"id": "b", "nodes": [], "calls": [{"usage": {"completion_tokens": 7}}]}
    again = {"task": {"key": "k"}, "traces": [relay, relay]}
    dump(tmp_path / "rollouts" / "step_4" / "eval" / "all" / "traces.jsonl", again)
    notes: list[str] = []
    found = formats.read(tmp_path, note=notes.append).samples
    columns = ("step", "response_tokens", "reward", "truncated", "domain", "index")
    assert sorted(found.select(columns).rows()) == [
        (4, 3, 2.0, True, "gsm8k", 1),
        (4, 7, None, None, "validation", 0),
    ]
    assert found["prompt"].n_unique() == 1
    assert any("effective" in note for note in notes)


def test_roll_s_board_is_filled_up_with_padding(tmp_path: Path) -> None:
    record = {"prompt": "q", "response": "abc", "reward": 1.0, "step": 2}
    padded = ["a", "b", "c", "<|endoftext|>", "<|endoftext|>", "<|endoftext|>"]
    masked = record | {"response_tokens": padded, "new_response_mask": [1, 1, 1, 0, 0]}
    trace = one(tmp_path, "data_1.jsonl", record | {"response_tokens": padded}, masked)
    assert trace.samples["response_tokens"].to_list() == [4, 3]


def test_slime_s_samples_as_lines(tmp_path: Path) -> None:
    record = {
        "prompt": "q",
        "response": "x",
        "response_length": 9,
        "reward": 1,
        "status": "truncated",
    }
    masked = record | {"loss_mask": [1, 1, 0, 0, 1], "status": "aborted"}
    frame = one(tmp_path, "12.jsonl", record, masked).samples
    assert frame.select("step", "response_tokens", "truncated", "state").rows() == [
        (12, 9, True, "kept"),
        (12, 3, False, "aborted"),
    ]


def test_tool_answers_within_a_text_are_not_counted(tmp_path: Path) -> None:
    text = "x" * 8 + "<tool_response>\n" + "r" * 400 + "\n</tool_response>" + "y" * 8
    trace = one(tmp_path, "1.jsonl", {"input": "q", "output": text, "score": 1.0})
    assert trace.samples["response_tokens"].to_list() == [4]


def table_of_layouts() -> str:
    rows = ["| `--format` | read as | files | keys | approximated |", "|---|---|---|---|---|"]
    for name, layout in LAYOUTS.items():
        paths = (*layout.prompt[:1], *layout.response, layout.conversation, *(layout.prefix or ()))
        counted = tuple(way.partition(":")[2] for way in layout.tokens)
        rest = (*layout.reward, *layout.step, *layout.domain[:1], layout.stop)
        keys = dict.fromkeys(key for key in (*paths, *counted, *rest) if key)
        shown = ", ".join(f"`{key}`" for key in keys)
        rows.append(
            f"| `{name}` | {layout.title} | {layout.files} | {shown} | {layout.approximated} |"
        )
    return "\n".join(rows) + "\n"


def test_the_documentation_has_the_table_of_the_code() -> None:
    page = Path(__file__).parents[3] / "docs" / "polytrace.md"
    assert table_of_layouts() in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("pieces", "count"),
    [
        (["a", "b", "<|im_end|>", "<pad>", "<pad>"], 3),
        (["a", "b", "<pad>", "<pad>"], 2),
        (["a", "b", "<|endoftext|>", "<|endoftext|>"], 3),
        (["a", "b", "</s>"], 3),
        (["a", "b"], 2),
        ([], 0),
    ],
)
def test_padding_is_no_part_of_a_response(pieces, count):
    assert tokens({"response": pieces}, ("padded:response",)) == count


def test_rewards_are_numbers_of_any_type_and_no_metrics(tmp_path):
    path = tmp_path / "completions_00001.jsonl"
    row = {"step": 1, "prompt": "p", "completion": "abc", "advantage": 0.0, "kl": 2.0}
    rows = [row | {"right": 1, "form": 0.5}, row | {"completion": "d", "right": 0, "form": 0.5}]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    said: list[str] = []
    trace = formats.read(path, format="trl", note=said.append)
    assert sorted(trace.samples["reward"]) == [0.5, 1.5]
    assert any("the sum of right, form" in line for line in said)


def test_a_wrong_element_of_an_array_is_an_error(tmp_path):
    path = tmp_path / "a.json"
    rows = '[{"input": "p", "output": "x", "score": 1, "step": 1},{"input": oops},{"input": "q"}]'
    path.write_text(rows)
    with pytest.raises(TraceError, match="not JSON in this record"):
        formats.read(path, format="verl")
