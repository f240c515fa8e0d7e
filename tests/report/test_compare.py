from __future__ import annotations

import shutil

import plotly.graph_objects as go
import pytest
from report_runs import MODES, page_data

from rollpacker.report.compare import write_comparison
from rollpacker.report.reading.run_folder import ReportError

RESULT = {
    "sampled_accuracy": 0.813,
    "greedy_accuracy": 0.86,
    "train_wall_s": 9.2,
    "rollout_wall_s": 7.1,
    "rollout_cpu_s": 12.0,
    "decode_steps": 43210,
    "decoded_tokens": 123456,
    "kept_tokens": 111222,
    "kept_vs_true_len": 1.0,
    "clipped_ratio": 0.0123,
    "prompts_trained": 192,
}


def summary() -> dict:
    return {
        "before": {"sampled_accuracy": 0.556, "greedy_accuracy": 0.6},
        "modes": {
            "off": RESULT,
            "exact": RESULT | {"train_wall_s": 6.8},
            "race": RESULT | {"kept_vs_true_len": 0.712},
        },
        "speedup": {"wall": 1.353, "decode_steps": 1.0},
        "recommended_mode": "exact",
    }


def test_modes_stand_beside_each_other(made, tmp_path):
    out = write_comparison(
        {m: made[m] for m in ("race", "off", "exact")}, summary(), tmp_path / "demo.html"
    )
    text, data = out.read_text(encoding="utf-8"), page_data(out)
    assert out.stat().st_size < 8e6
    for shown in ("1.35×", "0.712", "43,210", "123,456", "0.556 → 0.813", "6.80 s"):
        assert shown in text
    charts = data["gantts"]["gantt"]["charts"]
    assert [chart["name"] for chart in charts] == ["off", "race", "exact"]
    assert {chart["step"] for chart in charts} == {1}
    for figure in data["figures"].values():
        go.Figure(figure)
    assert len(data["figures"]["learning"]["data"]) == 2 * len(MODES)


@pytest.mark.parametrize("honest", [True, False])
def test_steps_of_an_emulation_are_drawn_where_it_kept_up(made, tmp_path, honest) -> None:
    cluster = {
        "off": {"run": str(made["off"]), "honest": True},
        "exact": {"run": str(made["exact"]), "honest": honest},
    }
    runs = {mode: made[mode] for mode in ("off", "exact")}
    out = write_comparison(runs, summary() | {"cluster": cluster}, tmp_path / "demo.html")
    assert ("cluster" in page_data(out)["gantts"]) == honest


def test_reports_of_the_runs_are_linked_where_they_are(made, tmp_path):
    beside = shutil.copytree(made["exact"], tmp_path / "exact")
    (beside / "report.html").touch()
    runs = {"off": made["off"], "exact": beside}
    out = write_comparison(runs, summary(), tmp_path / "demo.html")
    text = out.read_text(encoding="utf-8")
    assert '<a href="exact/report.html">report of exact</a>' in text


@pytest.mark.parametrize("drop", ["off", "race"])
def test_a_mode_without_results_is_named(made, tmp_path, drop):
    lacking = summary()
    del lacking["modes"][drop]
    with pytest.raises(ReportError, match=f"no results of mode '{drop}'"):
        write_comparison(made, lacking, tmp_path / "demo.html")
