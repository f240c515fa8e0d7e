from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import plotly.graph_objects as go
import polars as pl
import pytest
from report_runs import MODES, page_data

from rollpacker.core.sample_table import PROGRAM
from rollpacker.report.compare import write_comparison
from rollpacker.report.reading.run_folder import ReportError, load_run
from rollpacker.report.run_report import write_report
from rollpacker.report.sections import SHOWN, agreement_section, program_section
from rollpacker.report.sections import test_times as times_of
from rollpacker.report.timeline import write_timeline


@pytest.fixture(scope="module")
def pages(made):
    return {mode: page_data(write_report(made[mode])) for mode in MODES}


def rows(folder) -> pl.DataFrame:
    return pl.read_parquet(folder / "samples" / "*.parquet")


def metrics(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mode", MODES)
def test_headline_numbers_are_those_of_the_files(made, pages, mode):
    facts, samples, lines = pages[mode]["facts"], rows(made[mode]), metrics(made[mode])
    kept = samples.filter(pl.col("state") == "kept")
    lost = samples.filter(pl.col("state") != "kept")["tokens"].sum()
    assert facts["steps"] == 12
    assert facts["prompts_trained"] == 12 * 16
    assert facts["wall_s"] == pytest.approx(sum(line["step_time"] for line in lines))
    assert facts["kept_tokens"] == kept["tokens"].sum()
    assert facts["lost_tokens"] == lost == sum(line["tail/aborted_tokens"] for line in lines)
    assert facts["reward_first"] == lines[0]["reward"]
    assert facts["reward_last"] == lines[-1]["reward"]
    assert (facts["accuracy_first"], facts["accuracy_last"]) == (0.48, 0.81)
    assert facts["kept_mean_tokens"] == pytest.approx(kept["tokens"].mean())
    idle = sum(line["bubble/worker_idle_s"] for line in lines)
    assert facts["rollout_idle_s"] == pytest.approx(idle, abs=1e-3)


@pytest.mark.parametrize("finite", [0, 2])
def test_a_step_whose_agreement_is_no_number_is_told(made, finite):
    apart = [*[1e-6] * finite, None]
    lines = [
        {"step": n, "sampler/abs_logprob_difference": a, "sampler/effective_sample_size": 1.0}
        for n, a in enumerate(apart)
    ]
    run = load_run(made["exact"])
    config = run.config | {"engine": {"kind": "mini"}}
    (section,) = agreement_section(replace(run, metrics=lines, config=config))
    assert f"In 1 of {finite + 1} steps they are not finite" in section.text
    assert f"WARNING step {finite}: sampler and trainer disagree" in section.text
    assert "they agree" not in section.text


def test_length_bias_is_seen_in_race_and_nowhere_else(pages):
    ratio = {mode: pages[mode]["facts"]["kept_vs_true_len"] for mode in MODES}
    assert ratio["off"] == pytest.approx(1.0)
    assert ratio["exact"] == pytest.approx(1.0)
    assert 0.55 < ratio["race"] < 0.9


@pytest.mark.parametrize("mode", MODES)
def test_charts_hold_every_attempt_and_task(made, pages, mode):
    gantt = pages[mode]["gantts"]["gantt"]
    samples = rows(made[mode])
    tasks = [json.loads(line) for line in (made[mode] / "workers.jsonl").read_text().splitlines()]
    assert [chart["step"] for chart in gantt["charts"]] == list(range(12))
    for chart in gantt["charts"]:
        mine = samples.filter(pl.col("step") == chart["step"])
        drawn = [bar for worker in chart["workers"] for bar in worker["attempts"]]
        ids = {(chart["prompts"][bar[6]], bar[7]) for bar in drawn}
        assert ids == set(mine.select("prompt", "sample_index").iter_rows())
        aborted = sum(bar[3] == 1 for bar in drawn)
        assert aborted >= len(mine.filter(pl.col("state") == "aborted"))
        assert (mode == "exact") == any(bar[3] == 4 for bar in drawn), "moved ones are marked"
        done = sum(len(worker["tasks"]) for worker in chart["workers"])
        assert done == sum(task["step"] == chart["step"] for task in tasks)
        line = metrics(made[mode])[chart["step"]]
        assert chart["end"] == pytest.approx(line["step_time"], abs=1e-3)
        assert chart["rollout_bubble"] == pytest.approx(line["bubble/rollout_fraction"], abs=1e-3)


def test_marked_steps(made, pages):
    times = [line["step_time"] for line in metrics(made["exact"])]
    marked = pages["exact"]["gantts"]["gantt"]["marked"]
    assert marked["first"] == 0
    assert marked["longest"] == times.index(max(times))
    assert sorted(times).index(times[marked["median"]]) == 6


@pytest.mark.parametrize("mode", MODES)
def test_figures_are_valid_and_hold_the_metrics(made, pages, mode):
    plots, lines = pages[mode]["figures"], metrics(made[mode])
    for figure in plots.values():
        go.Figure(figure)
    reward = plots["learning"]["data"][0]
    assert reward["y"] == pytest.approx([line["reward"] for line in lines], rel=1e-5)
    accuracy = plots["learning"]["data"][2]
    assert accuracy["x"] == [0, 1, 5, 9, 12]
    bars = {trace["name"]: trace["y"] for trace in plots["time"]["data"]}
    sums = [sum(parts) for parts in zip(*bars.values(), strict=True)]
    assert sums == pytest.approx([line["step_time"] for line in lines], rel=1e-4)
    if mode == "race":
        lost = zip(*(trace["y"] for trace in plots["aborted"]["data"]), strict=True)
        assert [sum(parts) for parts in lost] == [line["tail/aborted_tokens"] for line in lines]
    else:
        assert "aborted" not in plots


def test_the_page_is_one_small_file_that_needs_no_network(made):
    html = write_report(made["race"])
    assert html == made["race"] / "report.html"
    assert html.stat().st_size < 8e6
    text = html.read_text(encoding="utf-8")
    assert text.count("<script") == text.count("</script>")
    own = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", own)
    assert not list(made["race"].glob("*.part"))


def test_what_users_name_cannot_break_out_of_the_page(copy):
    folder = copy("exact")
    evil = '</script><script>alert("x")</script>'
    samples = rows(folder).with_columns(prompt=pl.lit(evil) + pl.col("prompt"))
    samples.write_parquet(folder / "samples" / "step-000000.parquet", mkdir=True)
    with (folder / "config.yaml").open("a") as file:
        file.write(f"note: {json.dumps(evil)}\n")
    html = write_report(folder)
    assert "<script>alert" not in html.read_text(encoding="utf-8")
    assert evil in page_data(html)["gantts"]["gantt"]["charts"][0]["prompts"][0]


def test_metrics_may_lack_names_and_hold_nulls(copy):
    folder = copy("exact")
    lines = [{"step": step, "reward": None, "step_time": 1.0} for step in range(12)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 12, "reward": NaN}\n')
    facts = page_data(write_report(folder))["facts"]
    assert facts["reward_first"] is None
    assert facts["wall_s"] == 12.0


def test_without_the_extra_the_error_says_what_to_install():
    code = "import sys; sys.modules['plotly'] = None; import rollpacker.report.timeline; "
    code += "print('a timeline needs none'); import rollpacker.report.run_report"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "a timeline needs none\n")
    assert "pip install 'rollpacker[report]'" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("finished", [True, False])
def test_a_report_without_its_samples_shows_the_rest(copy, finished):
    folder = copy("exact")
    file = folder / "samples" / "step-000000.parquet"
    file.write_bytes(file.read_bytes()[:2000])
    if not finished:
        (folder / "summary.json").unlink()
    said: list[str] = []
    page = write_report(folder, said.append)
    assert write_timeline(folder).stat().st_size > 0
    [line] = said
    assert line.endswith("its rows are missing")
    text, data = page.read_text(encoding="utf-8"), page_data(page)
    assert "responses are missing" in text
    assert data["facts"]["steps"] == len(metrics(folder))
    assert data["facts"]["step_bubble"] is data["facts"]["kept_mean_tokens"] is None
    assert {"learning", "time"} <= data["figures"].keys()
    assert data["gantts"] == {}


def test_a_report_of_a_run_that_trained_nothing(copy):
    folder = copy("exact")
    dropped = rows(folder).with_columns(state=pl.lit("dropped"))
    dropped.write_parquet(folder / "samples" / "step-000000.parquet")
    data = page_data(write_report(folder))
    assert data["facts"]["prompts_trained"] == data["facts"]["kept_tokens"] == 0
    assert data["facts"]["lost_share"] == 1.0
    assert "lengths" not in data["figures"]


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
    for shown in ("1.35×", "0.712", "43,210", "123,456", "0.556", "0.813", "6.80 s"):
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


# --- test report programs: The report's section on tests, from a samples table.


def table(*rows: tuple[str, str | None, list[str], list[float], bool]) -> pl.DataFrame:
    schema = {"prompt": pl.String} | PROGRAM
    level = "standard"
    return pl.DataFrame(
        [(p, v, t, s, level if v else None, f if v else None) for p, v, t, s, f in rows],
        schema=schema,
        orient="row",
    )


SOME = table(
    ("a", "pass", ["pass", "pass"], [0.25, 0.5], False),
    ("a", "tle_cpu", ["pass", "tle_cpu"], [0.125, 4.0], False),
    ("b", "no_code", [], [], False),
    ("b", "fail", ["fail"], [0.0625], True),
    ("c", None, [], [], False),
)


def test_times_are_by_prompt_and_test() -> None:
    assert times_of(SOME.drop_nulls("code_verdict")).rows() == [
        ("a", 0, 2, 1.0, 0.0, 0.25, 0.25, 0.375),
        ("a", 1, 2, 0.5, 0.5, 4.0, 0.5, 4.5),
        ("b", 0, 1, 0.0, 0.0, 0.0625, None, 0.0625),
    ]


def test_the_slowest_and_the_most_failing_are_listed_once() -> None:
    section = program_section(SOME)
    assert section is not None
    assert section.text.startswith(
        "4 responses were graded by their programs: 25.0% passed all tests, 25.0% ran into a "
        "timeout, 0.0% crashed and 25.0% had no program. They took 4.94 s of CPU time at sandbox "
        "level standard. 1 of them have asserts"
    )
    assert section.table is not None
    listed = [(row[0], row[1]) for row in section.table.rows]
    assert listed == [("a", "1"), ("a", "0"), ("b", "0")]


def test_tables_are_short() -> None:
    slow = [(f"s{i}", "pass", ["pass"], [9.0 + i], False) for i in range(50)]
    bad = [(f"f{i}", "fail", ["fail"], [0.1], False) for i in range(50)]
    section = program_section(table(*slow, *bad))
    assert section is not None
    assert section.table is not None
    names = [row[0] for row in section.table.rows]
    assert names[:SHOWN] == [f"s{i}" for i in range(49, 39, -1)]
    assert len(names) == 2 * SHOWN
    assert all(name.startswith("f") for name in names[SHOWN:])


def test_runs_without_programs_have_no_section() -> None:
    assert program_section(SOME.select("prompt")) is None
    section = program_section(SOME.filter(pl.col("prompt") == "c"))
    assert section is not None
    assert section.text == "No program was graded."
