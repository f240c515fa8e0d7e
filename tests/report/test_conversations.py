"""Conversations: read from the table, found by their texts, shown on a page and a terminal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import polars as pl
import pytest
from episode_runs import SAID
from hypothesis import given
from hypothesis import strategies as st
from report_runs import page_data
from typer.testing import CliRunner

from rollpacker.cli import app
from rollpacker.core.codec import dumps
from rollpacker.report.reading.conversations import Message, ShownCall, conversation, says, turns_of
from rollpacker.report.reading.responses import find
from rollpacker.report.run_report import write_report
from rollpacker.report.sections import LONGEST

EVIL = "</script><img src=x onerror=\"document.title = 'pwned'\">\x1b[2J"
TEXT, TURNS, MESSAGES = 10, 11, 12
ROLE, NAME, TURN, CONTENT, CALLS, ERRORS = range(6)


@pytest.fixture
def folder(episodes, tmp_path) -> Path:
    return Path(shutil.copytree(episodes, tmp_path / "run"))


@pytest.fixture
def evil(folder) -> Path:
    """Whatever is said in it is markup, and would do something to a terminal."""
    call = {"function": {"name": EVIL, "arguments": {"x": EVIL}}}
    said = [
        {"role": EVIL, "content": EVIL, "name": EVIL, "tool_calls": [call]},
        {"role": "assistant", "text": EVIL, "bad_calls": [{"place": 0, "error": EVIL}]},
    ]
    file = folder / "samples" / "step-000000.parquet"
    pl.read_parquet(file).with_columns(messages=pl.lit(json.dumps(said))).write_parquet(file)
    return folder


def of(*messages: object, turns: int = 0) -> list[Message] | None:
    row = {"messages": json.dumps(messages), "turn_tokens": [3] * turns, "wait_s": [0.5] * turns}
    return conversation(row | {"added_tokens": [1] * turns})


def shown(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_messages_are_read_whatever_they_hold():
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    image = [{"type": "image", "url": "x"}]
    assert of(
        {"role": "assistant", "content": None, "tool_calls": [call, {"name": "g"}, "h"]},
        {"role": "tool", "name": "f", "content": parts},
        {"role": "user", "content": image},
        {"content": 7},
    ) == [
        Message(
            role="assistant",
            calls=(ShownCall("f", '{"a": 1}'), ShownCall("g", ""), ShownCall("", "h")),
        ),
        Message(role="tool", name="f", content="ab"),
        Message(role="user", content='[{"type":"image","url":"x"}]'),
        Message(role="", content="7"),
    ]


def test_of_calls_that_were_not_understood_the_text_is_shown():
    [said] = of({"role": "assistant", "content": "", "text": "<x>", "bad_calls": [{"error": "e"}]})
    assert (said.content, said.errors) == ("<x>", ("e",))
    [said] = of({"role": "assistant", "content": "so", "text": "so <x>", "tool_calls": []})
    assert said.content == "so"


def test_turns_are_told_of_the_replies():
    user, reply = {"role": "user"}, {"role": "assistant"}
    said = of(user, reply, user, reply, turns=2)
    assert [message.turn for message in said] == [0, 1, 0, 2]
    assert said[1].about == "3 tokens, waited 0.50 s for 1 token"
    assert [m.turn for m in of(reply, user, reply, turns=1)] == [0, 0, 0], "which one is not known"


@pytest.mark.parametrize("text", [None, "", "[", "{}", "[]", "[1]", '"x"', "[" * 100_000])
def test_what_is_no_conversation_is_none(text):
    assert conversation({"messages": text}) is None
    assert conversation({}) is None
    assert not says(text or "", "x")


def test_half_a_character_can_be_written():
    [said] = of({"role": "user", "content": "a\ud800", "name": "\udfff"})
    assert (said.content, said.name) == ("a?", "?")


def test_turns_in_one_line():
    row = {"turn_tokens": [12, 30], "wait_s": [0.25, 0.125], "tool_calls": 3, "failed_calls": 1}
    assert turns_of(row) == "2 turns (12 + 30 tokens), 0.38 s waited, 3 calls, 1 failed"
    row = {"turn_tokens": [12], "wait_s": [0.0], "tool_calls": 1, "failed_calls": 0}
    assert turns_of(row) == "1 turn, 0.00 s waited, 1 call"
    assert turns_of({"turn_tokens": None}) == turns_of({}) == ""


@given(st.text(max_size=8), st.text(max_size=3), st.sampled_from(["content", "name", "arguments"]))
def test_a_text_is_found_where_it_is_shown_and_nowhere_else(said, wanted, place):
    message = {"role": "user", "content": said}
    if place == "name":
        message = {"role": "tool", "name": said}
    if place == "arguments":
        message = {"role": "x", "tool_calls": [{"function": {"name": "", "arguments": said}}]}
    assert says(dumps([message]).decode(), wanted) == (wanted in said or wanted == "")


@pytest.mark.parametrize(
    ("wanted", "attempts"),
    [
        ("use the tool", {0}),
        ('I "add"\nthem', {0}),
        ('{"é": [1, 2]}', {0}),
        ('{"at":"sky"}', {1}),
        ("what was that?", {1}),
        ("{add</tool", {1}),
        ("no valid JSON", {1}),
        ("alone", {2}),
        ("as one text 0", {0}),
        ("as one text", {0, 1, 2, 4}),
        # Words of the JSON itself, and halves of its escapes.
        ("assistant", set()),
        ("content", set()),
        ("nthem", set()),
        ("\\n", set()),
    ],
)
def test_a_search_looks_into_conversations(episodes, wanted, attempts):
    found = find(episodes, pytest.fail, grep=wanted, limit=0)
    assert {row["attempt"] for row in found.rows} == attempts
    assert found.matching == len(attempts)


def test_a_search_of_a_run_without_an_environment_is_as_before(copy):
    folder = copy("off")
    file = folder / "samples" / "step-000000.parquet"
    text = pl.lit("text ") + pl.col("attempt").cast(pl.String)
    pl.read_parquet(file).with_columns(completion=text).write_parquet(file)
    found = find(folder, pytest.fail, grep="text 17", limit=0)
    assert {row["attempt"] for row in found.rows} >= {17, 170}
    assert all(row["completion"].startswith("text 17") for row in found.rows)
    assert "messages" not in found.rows[0]
    assert find(folder, pytest.fail, grep="nothing").matching == 0


def test_the_page_holds_conversations(folder):
    rows = page_data(write_report(folder))["browsers"]["responses"]["rows"]
    by_index = {row[2]: row for row in rows}
    assert set(by_index) == {0, 1, 2, 4}
    called = by_index[0]
    assert called[TEXT] == ""
    assert called[TURNS] == "2 turns (4 + 2 tokens), 4.00 s waited, 1 call"
    assert [message[ROLE] for message in called[MESSAGES]] == [m["role"] for m in SAID[0]]
    assert called[MESSAGES][1] == [
        "assistant",
        "",
        "turn 1: 4 tokens, waited 3.00 s for 7 tokens",
        'I "add"\nthem',
        [["add", '{"é": [1, 2]}']],
        [],
    ]
    assert by_index[1][MESSAGES][0][ERRORS] == ["the call is no valid JSON"]
    assert by_index[4][TEXT:] == ["as one text 4", "2 turns (1 + 1 tokens), 3.50 s waited", None]


def test_of_long_conversations_the_middles_are_left_out(folder):
    said = [{"role": "user", "content": f"{n}" + "x" * 50_000 + "end"} for n in range(10)]
    file = folder / "samples" / "step-000000.parquet"
    pl.read_parquet(file).with_columns(messages=pl.lit(json.dumps(said))).write_parquet(file)
    row = page_data(write_report(folder))["browsers"]["responses"]["rows"][0]
    texts = [message[CONTENT] for message in row[MESSAGES]]
    assert all(text.startswith(str(n)) for n, text in enumerate(texts))
    assert all(text.endswith("end") for text in texts)
    assert all("characters are left out here" in text for text in texts)
    assert sum(map(len, texts)) < 1.1 * LONGEST


def test_a_conversation_cannot_break_out_of_the_page(evil):
    html = write_report(evil).read_text(encoding="utf-8")
    assert "<img src=x" not in html
    [row, *_] = page_data(evil / "report.html")["browsers"]["responses"]["rows"]
    first, second = row[MESSAGES]
    assert (first[ROLE], first[NAME], first[CONTENT], first[CALLS][0][0]) == (EVIL,) * 4
    assert (second[CONTENT], second[ERRORS]) == (EVIL, [EVIL])


def test_the_command_prints_conversations(folder):
    text = shown("samples", folder, "--grep", "use the tool")
    assert "2 turns (4 + 2 tokens), 4.00 s waited, 1 call · kept" in text
    conversation = """[prompt]
prompt 0
[user]
use the tool
[assistant] turn 1: 4 tokens, waited 3.00 s for 7 tokens
I "add"
them
-> add {"é": [1, 2]}
[tool add]
3
[assistant] turn 2: 2 tokens, waited 1.00 s
It is 3.
"""
    assert conversation in text
    assert "[response]" not in text
    assert "-> not understood: the call is no valid JSON" in shown("samples", folder)
    last = shown("samples", folder, "--grep", "as one text 4")
    assert "[response]\nas one text 4\n" in last


def test_json_has_messages_as_they_are(folder):
    rows = json.loads(shown("samples", folder, "--json"))["samples"]
    by_attempt = {row["attempt"]: row for row in rows}
    assert {a: row["messages"] for a, row in by_attempt.items() if row["messages"]} == SAID
    assert by_attempt[0]["wait_s"] == [3.0, 1.0]
    assert by_attempt[3]["messages"] is None


def test_nothing_that_is_said_does_something_to_the_terminal(evil):
    text = shown("samples", evil, "--limit", 1)
    assert text.count(r"\x1b[2J") == 6
    assert [char for char in text if not char.isprintable() and char not in "\n\t"] == []


def test_in_a_browser_a_conversation_is_text(evil, chromium):
    page = write_report(evil)
    chromium.get(page.as_uri())
    run = chromium.execute_script
    assert run("return document.querySelectorAll('.response img, .response script').length") == 0
    assert run("return document.querySelectorAll('.said').length") >= 8
    contents = "return [...document.querySelectorAll('.said > pre')].map(p => p.textContent)"
    assert EVIL in run(contents)
    assert EVIL in run("return document.querySelector('.said .call code').textContent")
    assert "pwned" not in chromium.title
    severe = [entry for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"]
    assert severe == []


def test_in_a_browser_a_search_looks_into_calls(folder, chromium):
    chromium.get(write_report(folder).as_uri())
    run = chromium.execute_script
    run(
        "const s = document.querySelector(`[aria-label='search in the responses']`);"
        "s.value = 'É'; s.dispatchEvent(new Event('input'));"
    )
    assert run("return document.querySelectorAll('.response').length") == 1
    assert run("return document.querySelector('.said .call mark').textContent") == "é"
    assert run("return document.querySelectorAll('.said.tool').length") == 1
    assert run("return document.querySelector('.browser .chip').textContent").startswith("1 of ")
