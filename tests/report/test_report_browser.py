"""The report's browser of responses, in its data and in a real browser."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import polars as pl
from report_runs import page_data

from rollpacker.report import sections as module
from rollpacker.report.run_report import write_report

EVIL = (
    "</script><script>document.title = 'pwned'</script>"
    "<img src=x onerror=\"document.title = 'pwned'\">&amp; \u2028 "
)
STEP, ID, INDEX, REWARD, TOKENS, PLACES, TEXT = 0, 1, 2, 3, 4, 8, 10


def with_texts(folder: Path, completion: pl.Expr) -> pl.DataFrame:
    """Texts and two rewards for every response of a run folder."""
    file = folder / "samples" / "step-000000.parquet"
    frame = pl.read_parquet(file).with_columns(
        prompt_text=pl.lit(EVIL) + pl.col("prompt"),
        completion=completion,
        **{"rewards/math": pl.col("reward"), "rewards/style": pl.lit(None, pl.Float32)},
    )
    frame.write_parquet(file)
    return frame


def unique_text() -> pl.Expr:
    return pl.lit(EVIL) + pl.col("attempt").cast(pl.String).str.zfill(6)


def responses(folder: Path) -> dict:
    return page_data(write_report(folder))["browsers"]["responses"]


def test_each_step_shows_its_best_worst_longest_and_some_at_random(copy):
    folder = copy("race")
    frame = with_texts(folder, unique_text())
    data = responses(folder)
    by_text = {row["completion"]: row for row in frame.iter_rows(named=True)}
    assert len({row[TEXT] for row in data["rows"]}) == len(data["rows"])
    for row in data["rows"]:
        of = by_text[row[TEXT]]
        assert row[:5] == [of[n] for n in ("step", "prompt", "sample_index", "reward", "tokens")]
        assert data["prompts"][row[9]] == of["prompt_text"]
        assert row[7] == [of["reward"], None]
    assert data["rewards"] == ["math", "style"]
    for step in range(12):
        mine = frame.filter(pl.col("step") == step)
        shown = [row for row in data["rows"] if row[STEP] == step]
        graded = mine.drop_nulls("reward")["reward"].sort()
        lists = [[row for row in shown if row[PLACES][kind] is not None] for kind in range(4)]
        assert [len(some) for some in lists] == [8] * 4
        best, worst, longest, _ = lists
        assert sorted(row[REWARD] for row in worst) == graded[:8].to_list()
        assert sorted(row[REWARD] for row in best) == graded[-8:].to_list()
        assert sorted(r[TOKENS] for r in longest) == mine["tokens"].sort()[-8:].to_list()
    total = f"{frame.height:,} responses are in this page"
    assert total in (folder / "report.html").read_text(encoding="utf-8")


def test_a_page_holds_ten_megabytes_of_them_at_most(copy):
    """Of every step some, when not all fit; how many of how many is said."""
    folder = copy("race")
    frame = with_texts(folder, unique_text() + pl.lit("<" * 15_000))
    data = responses(folder)
    inside = json.dumps([data["rows"], data["prompts"]]).replace("<", "\\u003c")
    assert 0.9 * module.MOST_BYTES < len(inside) <= 1.01 * module.MOST_BYTES
    counts = Counter(row[STEP] for row in data["rows"])
    assert set(counts) == set(range(12))
    assert max(counts.values()) - min(counts.values()) <= 4
    said = f"{len(data['rows'])} of {frame.height:,} responses are in this page"
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert said in text
    assert "up to 10 MB" in text


def test_of_a_very_long_text_the_middle_is_left_out(copy):
    folder = copy("off")
    with_texts(folder, pl.lit("begin" + "x" * 50_000 + "end"))
    text = responses(folder)["rows"][0][TEXT]
    assert text.startswith("begin")
    assert text.endswith("end")
    assert "30,008 characters are left out here" in text
    assert len(text) < 20_100


def test_a_run_without_texts_says_how_to_keep_them(made):
    page = write_report(made["off"])
    assert "responses" not in page_data(page)["browsers"]
    assert "samples.texts=true" in page.read_text(encoding="utf-8")


def wait_until(drawn: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not drawn():
        assert time.monotonic() < end


def test_in_a_browser_it_shows_orders_and_searches_and_runs_nothing(copy, chromium):
    folder = copy("race")
    frame = with_texts(folder, unique_text())
    page = write_report(folder)
    chromium.get(page.as_uri())
    run = chromium.execute_script

    def choose(label: str, value: str) -> None:
        run(
            "const s = document.querySelector(`[aria-label='${arguments[0]}']`);"
            "s.value = arguments[1];"
            "s.dispatchEvent(new Event(s.tagName === 'INPUT' ? 'input' : 'change'));",
            label,
            value,
        )

    def texts() -> list[str]:
        return run(
            "return [...document.querySelectorAll('.response > pre')].map(p => p.textContent)"
        )

    def note() -> str:
        return run("return document.querySelector('.browser .chip').textContent")

    by_text = {row["completion"]: row for row in frame.iter_rows(named=True)}
    wait_until(texts)
    assert len(texts()) == 8
    assert {by_text[text]["step"] for text in texts()} == {11}
    choose("step of the responses", "3")
    choose("order of the responses", "worst")
    rewards = [by_text[text]["reward"] for text in texts()]
    assert rewards == sorted(rewards)
    assert rewards[0] == frame.filter(pl.col("step") == 3)["reward"].min()
    choose("order of the responses", "longest")
    assert by_text[texts()[0]]["tokens"] == frame.filter(pl.col("step") == 3)["tokens"].max()

    wanted = texts()[0][-6:]
    choose("search in the responses", wanted)
    assert [text[-6:] for text in texts()] == [wanted]
    assert run("return document.querySelector('.response mark').textContent") == wanted
    choose("step of the responses", "5")
    assert texts() == []
    assert note().startswith("0 of ")
    assert note().endswith(", 1 in all steps")
    choose("step of the responses", "all")
    assert len(texts()) == 1

    choose("search in the responses", "PWNED")
    assert len(texts()) == 12
    run("document.querySelector('.browser button').click()")
    assert len(texts()) == 24
    assert run("return document.querySelectorAll('.response script, .response img').length") == 0
    assert "pwned" not in chromium.title
    severe = [entry for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"]
    assert severe == []
    messages = [json.loads(e["message"])["message"] for e in chromium.get_log("performance")]
    sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    asked = [each["request"]["url"] for each in sent if each["documentURL"] == page.as_uri()]
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
