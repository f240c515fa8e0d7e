"""The page of a workload trace."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl
import pytest

from rollpacker.polytrace.describe import Layout, TaskReport, characterize, sentences
from rollpacker.polytrace.formats.ours.native import concat
from rollpacker.polytrace.model.workload import generate, load_model
from rollpacker.polytrace.schema import Trace
from rollpacker.report.drawing import trace_figures
from rollpacker.report.trace_report import write_trace_report

CODE = ("lengths", "prompts", "steps", "waiting", "reward-share")


@pytest.fixture(scope="module")
def trace() -> Trace:
    made = [generate(load_model(name), steps=3, prompts=20) for name in ("code", "search")]
    return concat(made)


@pytest.fixture(scope="module")
def reports(trace: Trace) -> dict[str, TaskReport]:
    return characterize(trace)


def embedded(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    return json.loads(found[1])


@pytest.fixture(scope="module")
def page(
    trace: Trace, reports: dict[str, TaskReport], tmp_path_factory: pytest.TempPathFactory
) -> str:
    out = tmp_path_factory.mktemp("page") / "sub" / "trace.html"
    assert write_trace_report(trace, reports, out) == out
    return out.read_text(encoding="utf-8")


def test_sentences_come_before_the_plots(page: str, reports: dict[str, TaskReport]) -> None:
    first_plot = page.index('data-figure="')
    for report in reports.values():
        for sentence in sentences(report):
            # Without its first letter, and as HTML writes an apostrophe.
            assert 0 < page.index(sentence[1:].replace("'", "&#39;")) < first_plot


def test_the_page_needs_no_network(page: str) -> None:
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=\"(?!data:)", page)


def test_every_plot_is_there_and_is_valid(page: str) -> None:
    figures = embedded(page)["figures"]
    expected = {f"{name}-0" for name in CODE}
    expected |= {f"{name}-1" for name in CODE if name != "reward-share"} | {"tools-1"}
    assert set(figures) == expected
    for figure in figures.values():
        # Names of properties that plotly does not know raise.
        go.Figure(figure["data"], figure["layout"])


def test_numbers_of_the_page_are_those_of_the_report(
    page: str, reports: dict[str, TaskReport]
) -> None:
    facts = embedded(page)["facts"]
    assert facts["search"]["mean"] == reports["search"].mean
    assert "code: Response lengths" in page
    assert f"{reports['code'].max:,.0f}" in page


def test_one_task_is_not_named_in_every_title(tmp_path: Path) -> None:
    trace = generate(load_model("math"), steps=1, prompts=8, responses=1)
    text = write_trace_report(trace, characterize(trace), tmp_path / "p.html").read_text()
    assert "<h2>Response lengths</h2>" in text
    assert set(embedded(text)["figures"]) == {"lengths-0", "steps-0", "waiting-0"}
    assert "Too few steps for a trend" in text


def test_a_task_s_name_cannot_break_the_page(tmp_path: Path) -> None:
    trace = generate(load_model("math"), steps=2, prompts=4)
    name = pl.lit("a/</script><b>").alias("task")
    odd = Trace(samples=trace.samples.with_columns(name))
    text = write_trace_report(odd, characterize(odd), tmp_path / "p.html").read_text()
    assert "</script><b>" not in text
    assert len(embedded(text)["figures"]) == 4


def test_waiting_follows_the_layout(trace: Trace, tmp_path: Path) -> None:
    layout = Layout(workers=1)
    reports = characterize(trace, layout)
    text = write_trace_report(trace, reports, tmp_path / "p.html", layout).read_text()
    idle = embedded(text)["figures"]["waiting-1"]["data"][0]
    assert idle["name"] == "engines idle"
    assert idle["y"] == [0.0] * 3


def test_the_distribution_counts_every_response() -> None:
    tokens = np.array([1.0, 1, 2, 3, 1000, 16000, 16000])
    figure = trace_figures.lengths(tokens, {"p50": 3.0, "p99": 16000.0, "max": 16000.0})
    histogram, *marks = figure["data"]
    assert sum(histogram["y"]) == pytest.approx(1.0, abs=1e-4)
    assert histogram["x"] == sorted(set(histogram["x"]))
    assert [mark["x"][0] for mark in marks] == [3.0, 16000.0]
    assert marks[1]["text"][1].strip() == "p99, max: 16,000"


@pytest.mark.parametrize("value", [1.0, 7.0])
def test_equal_lengths_have_a_distribution(value: float) -> None:
    histogram = trace_figures.lengths(np.full(5, value), {"max": value})["data"][0]
    assert sum(histogram["y"]) == pytest.approx(1.0)


def test_a_response_is_shown_against_the_others_of_its_prompt() -> None:
    lengths = np.array([10.0, 20, 40, 7, 100, 100])
    figure = trace_figures.within_and_between(lengths, np.array([0, 0, 0, 1, 2, 2]))
    assert figure is not None
    points = figure["data"][0]
    assert points["y"] == [10, 20, 40, 100, 100]
    others = [(20 * 40) ** 0.5, (10 * 40) ** 0.5, (10 * 20) ** 0.5, 100, 100]
    assert points["x"] == pytest.approx(others, rel=1e-5)
    assert trace_figures.within_and_between(lengths, np.arange(6)) is None


def test_many_responses_are_thinned() -> None:
    lengths, groups = np.arange(1.0, 10_001.0), np.arange(10_000) // 2
    figure = trace_figures.within_and_between(lengths, groups)
    assert figure is not None
    assert len(figure["data"][0]["x"]) == 2000
