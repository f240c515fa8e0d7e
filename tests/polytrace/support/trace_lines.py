"""Lines of PolyTrace files, written by code."""

import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def packed(step: Any = 0, rank: int = 0, local_index: int = 0, **more: Any) -> Record:
    output = more.pop("output", [10 + local_index, 20, 30])
    return {
        "step": step,
        "rank": rank,
        "dp_rank": rank // 4,
        "tp_rank": 0,
        "local_index": local_index,
        "input": 100 + local_index,
        "output": output,
        "n_sampling": len(output),
        "validate": False,
        **more,
    }


def turn(number: int, tokens: int, **more: Any) -> Record:
    return {
        "turn": number,
        "prompt_tokens": 50 * (number + 1),
        "cached_tokens": 49 * number,
        "completion_tokens": tokens,
        "finish_reason": "tool_calls",
        "engine_latency_s": 0.25,
        "max_new_tokens": 3000,
        **more,
    }


def multiturn(step: int = 0, group: int = 0, sample: int = 0, **more: Any) -> Record:
    turns = more.pop("turns", [turn(0, 40), turn(1, 131, finish_reason="stop")])
    call = {"turn": 0, "tool_name": "search", "latency_s": 0.5, "response_token_len": 900}
    return {
        "step": step,
        "prompt_len": 317,
        "max_response_len": 3000,
        "max_model_len": 7096,
        "turns": turns,
        "tool_calls": [{**call, "status": "success", "query_count": 2}],
        "finish_reason": "stop",
        "turn_count": len(turns),
        "tool_call_count": 1,
        "response_loss_mask_rle": [[1, 40], [0, 900], [1, 131]],
        "prompt_group_id": group,
        "sample_id": sample,
        **more,
    }


def timing(step: int = 0, rank: int = 0, **more: Any) -> Record:
    base = {"step": step, "rank": rank, "tp_rank": 0, "dp_rank": rank // 4, "batch_size": 6}
    return {**base, "reward_time_s": 77.25, "response_mean": 20.5, "validate": False, **more}


def dapo(step: int = 0, count: int = 4, kept: tuple[int, ...] = (1, 2), **more: Any) -> Record:
    return {
        "workload_step": step,
        "trainer_step": 1,
        "gen_batch_index": 1,
        "prompt_count": count,
        "kept_prompt_count": len(kept),
        "kept_prompt_indices": list(kept),
        "used_prompt_indices": list(kept[:1]),
        **more,
    }


def dump(path: Path, *lines: Record) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def load(folder: Path) -> dict[str, list[Record]]:
    return {
        path.relative_to(folder).as_posix(): [
            json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()
        ]
        for path in sorted(folder.rglob("*.jsonl"))
    }


def polytrace_folder(folder: Path) -> Path:
    four = [packed(0, rank, place) for rank in (4, 0) for place in (0, 1)]
    dump(folder / "packed_lengths_step_0.jsonl", *four)
    dump(folder / "packed_lengths_step_10.jsonl", packed(10, unknown={"a": [1, None, 2.5]}))
    dump(folder / "packed_lengths_step_2.jsonl", packed(2, 0, 5), packed(2, 0, 3, tp_rank=None))
    dump(folder / "reward_timings_step_0.jsonl", timing(), timing(rank=4, note="ü\ud800"))
    dump(folder / "dapo_filter_indices.jsonl", dapo(), dapo(10, 1, (), later=True))
    return folder
