"""A session's requests, without a program."""

from typing import Any

import pytest
from agent_programs import reply

from rollpacker.env.agent.server.http import RefusedError
from rollpacker.env.agent.server.session import Session
from rollpacker.env.base import Message
from waiting import in_loop

USER = {"role": "user", "content": "Why?"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
OTHER = {"type": "function", "function": {"name": "g", "parameters": {}}}


def ask(session: Session, *messages: Any, **more: Any) -> Any:
    return session.ask({"messages": list(messages), **more})


@in_loop
async def test_a_request_is_read_once_and_answered_once() -> None:
    session = Session()
    assert session.take() is None
    asked = ask(session, USER, tools=[TOOL])
    assert session.news.is_set()
    assert session.take() is asked
    assert session.take() is None
    assert (asked.new, asked.tools) == ([USER], [TOOL])
    assert session.waiting
    session.answer(reply("Since."))
    session.answer(reply("Again."))
    assert asked.reply.result()["content"] == "Since."
    assert not session.waiting


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"n": 2}, "n=2: an episode is one conversation"),
        ({"n": "x" * 1000}, "n='xxx"),
        ({"functions": [{"name": "f"}]}, "'functions' is not served"),
        ({"tools": "f"}, "'tools' must be a list"),
        ({"tools": [{"type": "web_search"}]}, "'tools' must be a list"),
        ({"messages": 3}, "'messages' must be a list"),
    ],
)
@in_loop
async def test_what_is_not_served_is_refused_and_leaves_the_session_as_it_was(
    more: dict[str, Any], why: str
) -> None:
    session = Session()
    with pytest.raises(RefusedError, match=why) as refused:
        session.ask({"messages": [USER], **more})
    assert refused.value.status == 400
    assert len(str(refused.value)) < 300
    assert session.take() is None
    assert ask(session, USER, n=1).new == [USER]


@in_loop
async def test_two_requests_at_once_are_refused_and_the_first_is_answered() -> None:
    session = Session()
    first = ask(session, USER)
    for messages in ([USER], [USER, USER]):
        with pytest.raises(RefusedError, match="another request waits"):
            ask(session, *messages)
    session.answer(reply("Since."))
    assert first.reply.result()["content"] == "Since."


@in_loop
async def test_the_same_history_again_is_a_branch() -> None:
    session = Session()
    ask(session, USER)
    session.answer(reply("Since."))
    with pytest.raises(RefusedError, match="neither be shortened nor branched"):
        ask(session, USER)


@pytest.mark.parametrize("answered", [False, True])
@in_loop
async def test_a_request_sent_again_after_its_connection_was_lost_is_the_same(
    answered: bool,
) -> None:
    session = Session()
    first = ask(session, USER)
    session.take()
    first.heard = False
    if answered:
        session.answer(reply("Since."))
    again = ask(session, {"role": "user", "content": "Why? "})
    assert again is first
    assert again.heard
    assert session.take() is None
    if not answered:
        session.answer(reply("Since."))
    assert again.reply.result()["content"] == "Since."


@pytest.mark.parametrize("answered", [False, True])
@in_loop
async def test_a_request_that_says_that_it_is_sent_again_is_the_same(answered: bool) -> None:
    session = Session()
    first = ask(session, USER)
    if answered:
        session.answer(reply("Since."))
    assert session.ask({"messages": [USER]}, again=True) is first
    with pytest.raises(RefusedError):
        session.ask({"messages": [USER, USER]}, again=True)


@in_loop
async def test_another_request_after_a_lost_connection_still_has_to_wait() -> None:
    session = Session()
    ask(session, USER).heard = False
    with pytest.raises(RefusedError, match="another request waits"):
        ask(session, USER, USER)


@in_loop
async def test_tools_may_be_left_out_later_and_not_added() -> None:
    session = Session()
    ask(session, USER, tools=[TOOL])
    session.answer(reply("Since."))
    history = [USER, {"role": "assistant", "content": "Since."}, USER]
    with pytest.raises(RefusedError, match="one that the first request lacked"):
        ask(session, *history, tools=[TOOL, OTHER])
    asked = ask(session, *history)
    assert asked.new == [USER]
    assert not session.calling


@in_loop
async def test_calls_are_given_as_calls_and_nothing_else_is_given() -> None:
    session = Session()
    asked = ask(session, USER, tools=[TOOL])
    said = reply("I call.", ("f", {"a": 1}), bad=1)
    assert session.calling
    session.answer(said)
    wanted = {key: said[key] for key in ("role", "content", "tool_calls")}
    assert asked.reply.result() == wanted


@pytest.mark.parametrize(
    ("more", "said"),
    [
        *((more, reply("", ("f", {}))) for more in ({}, {"tools": []})),
        ({"tools": [TOOL], "tool_choice": "none"}, reply("", ("f", {}))),
        ({"tools": [TOOL]}, reply("", bad=1)),
    ],
)
@in_loop
async def test_calls_without_tools_or_sense_are_text(more: dict[str, Any], said: Message) -> None:
    session = Session()
    asked = ask(session, USER, **more)
    assert session.calling is (more == {"tools": [TOOL]})
    session.answer(said)
    assert asked.reply.result() == {"role": "assistant", "content": said["text"]}


@in_loop
async def test_a_closed_session_says_that_the_episode_is_over() -> None:
    session = Session()
    asked = ask(session, USER)
    session.close()
    refused = asked.reply.result()
    assert isinstance(refused, RefusedError)
    assert (refused.status, refused.code) == (410, "episode_over")
    with pytest.raises(RefusedError, match="episode is over"):
        ask(session, USER)
    session.answer(reply("Too late."))
