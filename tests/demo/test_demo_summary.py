"""What the demo says of its runs."""

from pathlib import Path
from typing import Any

import pytest

from rollpacker.demo.run import compare, free_folder


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
    assert "racing pays where" in result["scope"]
    assert "rollpacker estimate --from" in result["scope"]
    assert "rollpacker estimate --from" in result["scope"]


def test_a_folder_in_use_gives_way_to_the_next(tmp_path: Path) -> None:
    assert free_folder(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    assert free_folder(tmp_path / "demo") == tmp_path / "demo", "nothing is in it"
    for number, name in enumerate(("demo", "demo-2"), start=2):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "off").mkdir()
        assert free_folder(tmp_path / "demo") == tmp_path / f"demo-{number}"
