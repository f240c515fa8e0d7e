"""What changes nothing for the model is let through; a history that is another one is not."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from case_files import read_table
from rollpacker.env.agent.server.http import RefusedError
from rollpacker.env.agent.server.session import behind, named, read, same


def call(name: str, key: str = "k", **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": key, "type": "function", "function": function}


USER = {"role": "user", "content": "Why?"}
CALLS = [call("f", a=1, b=[2]), call("g", "l")]
THOUGHT = {
    "role": "assistant",
    "content": "<think>hm</think>\nLet me see.",
    "tool_calls": CALLS,
    "refusal": None,
}
TOOL = {"role": "tool", "tool_call_id": "k", "content": "42"}
KNOWN = [USER, THOUGHT, TOOL]


def test_messages_are_made_for_the_chat_template() -> None:
    said = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call("f", a=1)], "audio": None},
        {"role": "tool", "tool_call_id": "k", "name": "f", "content": "42", "x": 1},
    ]
    function = {"name": "f", "arguments": {"a": 1}}
    assert read(said) == [
        {"role": "system", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "k", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "42", "name": "f", "tool_call_id": "k"},
    ]


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        *read_table(__file__, "test_what_is_no_conversation_is_refused"),
        ([USER, {"role": "assistant", "content": "I"}], "last message is the assistant's"),
    ],
)
def test_what_is_no_conversation_is_refused(messages: Any, why: str) -> None:
    with pytest.raises(RefusedError, match=why) as refused:
        read(messages)
    assert refused.value.status == 400


def test_new_messages_come_behind_those_that_are_known() -> None:
    assert behind([], read([USER])) == read([USER])
    assert behind(KNOWN, read([*KNOWN, USER])) == read([USER])


def rewritten(message: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """As some client writes it."""
    now = dict(message)
    if rng.random() < 0.5 and now["content"]:
        now["content"] = [{"type": "text", "text": f"{now['content']} \n"}]
    if message["role"] == "assistant":
        calls = [call(each["function"]["name"], key=str(rng.random())) for each in CALLS]
        for each, was in zip(calls, CALLS, strict=True):
            arguments = json.loads(was["function"]["arguments"])
            shuffled = rng.sample(sorted(arguments.items()), len(arguments))
            each["function"]["arguments"] = json.dumps(dict(shuffled), indent=rng.randint(0, 2))
        now["tool_calls"] = rng.sample(calls, len(calls))
        now["content"] = rng.choice(
            [now["content"], None, "", "Let me see.", "  Let me see.", message["content"]]
        )
        if now["content"] and rng.random() < 0.3:
            del now["tool_calls"]
        now.pop("refusal", None)
        if not now["content"] and rng.random() < 0.5:
            del now["content"]
    return now


@given(st.integers(0, 1 << 30))
def test_harmless_rewrites_are_the_same_conversation(seed: int) -> None:
    rng = random.Random(seed)
    said = [*(rewritten(message, rng) for message in KNOWN), USER]
    assert behind(KNOWN, read(said)) == read([USER])


@pytest.mark.parametrize(
    ("index", "changes"),
    [
        *read_table(__file__, "test_another_history_is_refused"),
        (1, {"tool_calls": CALLS[:1]}),
        (1, {"tool_calls": [*CALLS, CALLS[0]]}),
        (1, {"tool_calls": [CALLS[0], call("g", x=1)]}),
    ],
)
def test_another_history_is_refused(index: int, changes: dict[str, Any]) -> None:
    said = [dict(message) for message in KNOWN]
    said[index] |= changes
    with pytest.raises(RefusedError, match=rf"messages\[{index}\] .* was changed") as refused:
        behind(KNOWN, read([*said, USER]))
    assert refused.value.status == 400


@pytest.mark.parametrize("said", [{"tool_calls": CALLS}, {"content": "Since."}])
def test_a_reply_may_not_be_left_out_as_a_whole(said: dict[str, Any]) -> None:
    was, nothing = read([{"role": "assistant", **said}, {"role": "assistant"}, USER])[:2]
    assert same(was, was)
    assert not same(was, nothing)


@pytest.mark.parametrize("kept", [1, 3])
def test_a_history_that_is_shorter_or_as_long_is_refused(kept: int) -> None:
    with pytest.raises(RefusedError, match="neither be shortened nor branched"):
        behind(KNOWN, read(KNOWN[:kept]))


def test_what_a_tool_answers_has_its_name() -> None:
    answers = [{"role": "tool", "tool_call_id": key, "content": ""} for key in ("l", "k", "?")]
    given = {"role": "tool", "tool_call_id": "k", "content": "", "name": "mine"}
    new = read([*answers, given, USER])
    names = [message.get("name") for message in named(new, read([THOUGHT, USER]))]
    assert names == ["g", "f", None, "mine", None]
    shot = named(read([THOUGHT, answers[0]]), [])
    assert shot[1]["name"] == "g"


def test_of_arguments_that_are_no_json_the_text_counts() -> None:
    odd, other = call("f"), call("f")
    odd["function"]["arguments"], other["function"]["arguments"] = "{a", "{b"
    messages = [{"role": "assistant", "content": "", "tool_calls": [each]} for each in (odd, other)]
    assert same(messages[0], read([messages[0], USER])[0])
    assert not same(messages[0], read([messages[1], USER])[0])
