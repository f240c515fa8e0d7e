"""Families with calls of their own: what their chat templates write, and what stays as sampled."""

from __future__ import annotations

from typing import Any

import pytest
from call_texts import ONE
from chat_models import ADD
from family_models import FAMILIES, family_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from one_episode import Says, talk_with

from rollpacker.config import EnvironmentConfig, parse
from rollpacker.env.template import Template
from rollpacker.env.template_check import check
from rollpacker.job.plan.problems import check_call_ends
from rollpacker.train.model.loading import Card

MADE = {name: family_tokenizer(name) for name in FAMILIES}
TEMPLATES = {name: Template(MADE[name], {}) for name in FAMILIES}
QUESTION = {"role": "user", "content": "How much is 2 + 3?"}
NEXT = {"role": "user", "content": "And 4 + 4?"}
RESULT = {"role": "tool", "name": "add", "content": "5", "tool_call_id": "000000000"}
CALLS = [
    {
        "id": "000000000",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'},
    }
]
CALLED: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": CALLS}
SAID = {
    "gpt_oss": "<|channel|>final<|message|>It is 5.",
    "glm4_5": "\n<think></think>\nIt is 5.",
    "mistral_v3": " It is 5.",
}
"""How a model says so, where it says more."""
TAILS = {
    "glm4_5": "<|observation|>\n<tool_response>\n5\n</tool_response><|assistant|>",
    "mistral_v3": '</s>[TOOL_RESULTS] {"content": 5, "call_id": "000000000"}[/TOOL_RESULTS]',
    "mistral_small_3_2": "</s>[TOOL_RESULTS]000000000[TOOL_CONTENT]5[/TOOL_RESULTS]",
    "ministral3": "</s>[TOOL_RESULTS]5[/TOOL_RESULTS]",
    "functiongemma": (
        "<start_function_response>response:add{value:<escape>5<escape>}<end_function_response>"
    ),
    "gemma4": '<|tool_response>response:add{value:<|"|>5<|"|>}<tool_response|>',
    "gemma3_pythonic": (
        "<end_of_turn>\n<start_of_turn>user\n<tool_response>\n5</tool_response><end_of_turn>\n"
        "<start_of_turn>model\n"
    ),
    "deepseek_r1": (
        "<｜end▁of▁sentence｜><｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>5<｜tool▁output▁end｜>"
        "<｜tool▁outputs▁end｜>"
    ),
    "deepseek_v3_1": "<｜end▁of▁sentence｜><｜tool▁output▁begin｜>5<｜tool▁output▁end｜>",
    "gpt_oss": (
        '<|call|><|start|>functions.add to=assistant<|channel|>commentary<|message|>"5"<|end|>'
        "<|start|>assistant"
    ),
}
"""What comes behind a call, as the models' own templates have it."""


def ids(name: str, text: str) -> list[int]:
    return MADE[name](text, add_special_tokens=False)["input_ids"]


def token(name: str, text: str) -> int:
    (one,) = ids(name, text)
    return one


def whole(name: str, messages: list[dict[str, Any]]) -> str:
    return TEMPLATES[name].render(messages, [ADD], goes_on=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_format_is_found_in_the_template(name: str) -> None:
    assert TEMPLATES[name].call_format == FAMILIES[name].form
    assert not TEMPLATES[name].guessed
    assert all(
        line.endswith("kept as it was sampled") for line in check(TEMPLATES[name], [ADD])[1:]
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_tool_answers_comes_as_behind_a_call(name: str) -> None:
    """In the tokens of the whole, from the end of the call on."""
    assert TEMPLATES[name].behind([RESULT], [ADD]) == TAILS[name]
    text = whole(name, [QUESTION, CALLED, RESULT])
    assert text.endswith(TAILS[name])
    tail = ids(name, TAILS[name])
    assert ids(name, text)[-len(tail) :] == tail


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_with_calls_is_kept_token_by_token(name: str) -> None:
    """Whatever the tokens of the call: only what it has not sampled is put behind it."""
    template, family = TEMPLATES[name], FAMILIES[name]
    text = ONE[template.call_format or "hermes"]
    usual = ids(name, text)
    unusual = [one for char in text for one in ids(name, char)]
    assert usual != unusual
    tail = ids(name, TAILS[name])
    for sampled in (usual, unusual):
        call_end = token(name, family.call_end)
        assert template.delta(sampled, [RESULT], [ADD]) == tail
        assert template.delta([*sampled, call_end], [RESULT], [ADD]) == tail[1:]
    # DeepSeek-R1's template opens the reasoning of a first reply, and of none behind an answer.
    called = [*usual, token(name, family.call_end)]
    message = template.reply(called, [ADD], answered=True).message
    assert message["tool_calls"][0]["function"] == CALLS[0]["function"]
    assert message["content"] == ""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_in_pieces_is_the_template_s_as_a_whole(name: str) -> None:
    template = TEMPLATES[name]
    said = SAID.get(name, "It is 5.")
    sampled = [*ids(name, said), token(name, FAMILIES[name].end)]
    tokens = [*sampled, *template.delta(sampled, [NEXT], [ADD])]
    # Of the template, without its last token in place of a turn's end, and what a turn opens.
    inside = MADE[name].decode(tokens).replace("<|return|>", "<|end|>")
    plain = {"role": "assistant", "content": "It is 5."}
    if name == "mistral_v3":  # it shows tools before the last question alone
        inside = inside[: inside.index("[AVAILABLE")] + inside[inside.index("[INST]") :]
        expected = template.render([QUESTION, plain, NEXT], (), goes_on=True)
    else:
        expected = whole(name, [QUESTION, plain, NEXT])
    assert expected.endswith(inside)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_without_a_name_is_rendered_too(name: str) -> None:
    """As one to a call that nobody understood is."""
    nameless = {key: value for key, value in RESULT.items() if key != "name"}
    tail = MADE[name].decode(TEMPLATES[name].delta([5], [nameless], [ADD]))
    assert "5" in tail
    assert "look_up" not in tail


@pytest.mark.parametrize("name", FAMILIES)
def test_an_episode(name: str) -> None:
    """Its calls get through, and what is answered comes behind them; a wrong one is no harm."""
    template, form = TEMPLATES[name], TEMPLATES[name].call_format
    assert form is not None
    first = "Hm.</think>" if name == "deepseek_r1" else ""
    call = ONE[form]
    environment = Says(turns=[[RESULT], [RESULT], [NEXT]])
    cut = call.replace(": 3", ": ").replace("b:3", "b:[").replace("b=3", "b=").replace(">3<", "")
    answers = talk_with(
        MADE[name], template, environment, first + call, cut, SAID.get(name, "Yes.")
    )
    assert [answer.error for answer in answers] == [""] * 4
    good, bad, _ = environment.heard
    assert good["tool_calls"][0]["function"]["name"] == "add"
    assert bad["bad_calls"]


@given(st.data(), st.sampled_from(sorted(FAMILIES)))
def test_any_tokens_are_a_reply(data: st.DataObject, name: str) -> None:
    tokens = data.draw(st.lists(st.integers(0, len(MADE[name]) - 1), max_size=40))
    message = TEMPLATES[name].reply(tokens, [ADD]).message
    assert isinstance(message["content"], str)
    assert TEMPLATES[name].delta(tokens, [RESULT], [ADD])


# Harmony ---------------------------------------------------------------------------------------


def test_what_harmony_s_template_changes_is_named() -> None:
    ends, thought, calls = check(TEMPLATES["gpt_oss"], [ADD])
    assert "ends earlier replies with '<|end|>', where the model samples '<|return|>'" in ends
    assert "changes the reasoning of earlier turns when a user message follows" in thought
    assert "changes calls of tools ('<|channel|>commentary to=functions.add" in calls


def test_the_last_token_of_harmony_s_reply_stays_in_place_of_the_turn_s_end() -> None:
    template = TEMPLATES["gpt_oss"]
    body = ids("gpt_oss", SAID["gpt_oss"])
    behind = "<|start|>user<|message|>And 4 + 4?<|end|><|start|>assistant"
    for last in ("<|return|>", "<|end|>"):
        delta = template.delta([*body, token("gpt_oss", last)], [NEXT], ())
        assert MADE["gpt_oss"].decode(delta) == behind
    assert MADE["gpt_oss"].decode(template.delta(body, [NEXT], ())) == f"<|end|>{behind}"


def test_analysis_is_shown_as_reasoning_and_stays_in_the_tokens() -> None:
    analysis = "<|channel|>analysis<|message|>Add them.<|end|><|start|>assistant"
    message = TEMPLATES["gpt_oss"].reply(ids("gpt_oss", analysis + SAID["gpt_oss"])).message
    assert message["content"] == "<think>\nAdd them.\n</think>\n\nIt is 5."
    message = TEMPLATES["gpt_oss"].reply(ids("gpt_oss", analysis + ONE["harmony"])).message
    assert message["content"] == "<think>\nAdd them.\n</think>"
    assert message["tool_calls"][0]["function"] == CALLS[0]["function"]


# Reasoning that a template opens -----------------------------------------------------------------


def test_a_template_may_open_reasoning_before_a_reply_and_not_behind_an_answer() -> None:
    template = TEMPLATES["deepseek_r1"]
    call = ids("deepseek_r1", ONE["deepseek_v3"])
    assert "tool_calls" not in template.reply(call).message
    assert template.reply(call, answered=True).message["tool_calls"]


# Ends ------------------------------------------------------------------------------------------


def job(**settings: Any) -> Any:
    tree = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"function": "math"}]}
    environment = {"kind": "tools", "path": ["a.py:f"]}
    return parse(tree | {"environment": environment} | settings)


def card(name: str, *ends: str) -> Card:
    stops = tuple(token(name, end) for end in ends)
    return Card(
        kind="any", tokenizer=MADE[name], context=100, heads=1, kv_heads=1, stop_token_ids=stops
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_s_end_that_ends_no_response_is_said(name: str) -> None:
    family = FAMILIES[name]
    both = card(name, family.end, family.call_end)
    assert not check_call_ends(job(), both)
    alone = check_call_ends(job(), card(name, family.end))
    if family.end == family.call_end:
        assert not alone
        return
    assert alone == [
        f"model.path: its chat template has '{family.call_end}' after a tool call, but responses "
        f"end only with '{family.end}', so the model would invent the tool's answer: set "
        f"rollout.stop: ['{family.call_end}']"
    ]
    assert not check_call_ends(job(rollout={"stop": [family.call_end]}), card(name, family.end))
    assert not check_call_ends(job(environment=None), card(name, family.end))


def test_every_format_has_a_name_in_the_configuration() -> None:
    for family in FAMILIES.values():
        named = EnvironmentConfig(kind="tools", path=["a.py:f"], call_format=family.form)  # pyright: ignore
        assert named.call_format == family.form
