"""Where workers have all cores, the driver takes its time from them, and no mode beats the sum."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_estimate import near_the_cap

from rollpacker.cli.simulate.app import _tell  # pyright: ignore[reportPrivateUsage]
from rollpacker.sim.estimate import estimate as est
from rollpacker.sim.estimate.verdict import ModeEstimate, sentences
from rollpacker.sim.recorded.run_record import SharedCores, read_shared_cores
from rollpacker.sim.workload.source import of_trace

SUMMARY: dict[str, Any] = {
    "steps": 10,
    "decoded_tokens": 4_000,
    "timing_s": {"worker_cpu": 12.0, "decode_cpu": 8.0, "driver_cpu": 1.0},
    "cores": {"all": 2, "workers": 2},
}


def written(folder: Path, **changes: Any) -> Path:
    (folder / "summary.json").write_text(json.dumps(SUMMARY | changes), encoding="utf-8")
    return folder


def test_the_work_of_a_step_without_gaps_is_read(tmp_path: Path) -> None:
    shared = read_shared_cores(written(tmp_path))
    assert shared is not None
    # 400 tokens of 2 ms, 0.4 s of gradients and 0.1 s of the driver, on two cores
    assert shared.least_s(400) == pytest.approx((0.8 + 0.5) / 2)


@pytest.mark.parametrize("changes", [{"cores": {"all": 4, "workers": 2}}, {"cores": {}}])
def test_nothing_is_shared_where_the_driver_has_cores(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    assert read_shared_cores(written(tmp_path, **changes)) is None
    assert read_shared_cores(tmp_path / "of an earlier version") is None


def test_a_bound_is_never_told_as_a_gain() -> None:
    def mode(speedup: float, kept: float) -> ModeEstimate:
        return ModeEstimate(speedup=speedup, kept_vs_true_len=kept, step_s=1.0, decoded_vs_kept=1.0)

    modes = {
        "off": mode(1, 1),
        "exact": mode(1.1, 1),
        "prompts": mode(1, 1),
        "race": mode(1.3, 0.8),
    }
    ahead = {"2.0": mode(1.5, 1)}
    told = sentences(
        modes,
        "exact",
        ahead=ahead,
        left_out="grading",
        at_most=True,
        depends=None,
        read=999,
        limit=0.95,
    )
    assert any("would make exact at most 1.50x at 2.0 tokens" in line for line in told)
    assert any("Use exact: at most 1.10x faster" in line for line in told)
    assert any("Mode race may be faster (1.30x at most)" in line for line in told)


def test_a_race_pays_for_what_it_aborts(capsys: pytest.CaptureFixture[str]) -> None:
    trace = near_the_cap(np.random.default_rng(0))
    job = est.on_paper_gpus("made", of_trace(trace))
    full = SharedCores(cores=2, token_s=1.0, step_s=0.0)  # the cores are never idle in off
    found = est.estimate(replace(job, shared=full), trace, steps=1)
    assert found.modes["exact"].speedup == pytest.approx(1.0)
    assert found.modes["race"].speedup < 0.9
    assert found.recommended == "exact"
    _tell(found, ["made"])
    assert "upper bounds: driver, grading and workers take turns on 2 cores" in (
        capsys.readouterr().out.replace("\n", " ")
    )
