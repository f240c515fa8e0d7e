"""The chat template between messages and tokens: nothing is tokenised twice."""

from typing import Any
from unittest.mock import ANY

import pytest
from call_texts import ONE
from chat_models import ADD, NAMES, SPECIAL, make_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.env.template import Template

CALLING = ["llama3_1", "qwen2_5", "qwen3", "qwen3_instruct_2507"]
"""Templates that write calls of tools."""
ENDS = {"llama3": "<|eot_id|>", "llama3_1": "<|eot_id|>"}
QUESTION = {"role": "user", "content": "How much is 2 + 3?"}
NEXT = {"role": "user", "content": "And 4 + 4?"}
RESULT = {"role": "tool", "name": "add", "content": "5", "tool_call_id": "abcdef123"}

MADE = {name: make_tokenizer(name) for name in NAMES}
TEMPLATES = {name: Template(MADE[name], {}) for name in NAMES}


def ids(name: str, text: str) -> list[int]:
    return MADE[name](text, add_special_tokens=False)["input_ids"]


def end(name: str) -> int:
    return MADE[name].convert_tokens_to_ids(ENDS.get(name, "<|im_end|>"))


def whole(name: str, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
    return MADE[name].apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )


def joined(name: str, reply: str, follows: list[dict[str, Any]], tools: Any = ()) -> str:
    template = TEMPLATES[name]
    prompt = template.prompt([QUESTION], tools)
    sampled = [*ids(name, reply), end(name)]
    tokens = [*prompt, *sampled, *template.delta(sampled, follows, tools)]
    return MADE[name].decode(tokens)


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [1, 2])
def test_a_conversation_in_pieces_is_the_template_s_as_a_whole(name: str, count: int) -> None:
    follows = [NEXT] * count
    expected = whole(name, [QUESTION, said("It is 5."), *follows])
    assert joined(name, "It is 5.", follows) == expected


@pytest.mark.parametrize("name", CALLING)
@pytest.mark.parametrize("count", [1, 2])
def test_what_tools_answer_is_rendered_as_in_the_whole(name: str, count: int) -> None:
    turn = said("") | {
        "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
        ]
    }
    expected = whole(name, [QUESTION, turn, *[RESULT] * count], [ADD])
    form = TEMPLATES[name].call_format
    assert form is not None
    found = joined(name, ONE[form], [RESULT] * count, [ADD])
    assert found == expected


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@given(name=st.sampled_from(["qwen2_5", "smollm2", "qwen3_instruct_2507"]), reply=TEXT, text=TEXT)
def test_any_text_is_kept(name: str, reply: str, text: str) -> None:
    follows = [{"role": "user", "content": text}]
    assert joined(name, reply, follows) == whole(name, [QUESTION, said(reply), *follows])


@pytest.mark.parametrize("name", NAMES)
def test_the_tokens_of_the_delta_are_those_of_the_whole(name: str) -> None:
    sampled = [*ids(name, "It is 5."), end(name)]
    delta = TEMPLATES[name].delta(sampled, [NEXT], ())
    together = ids(name, whole(name, [QUESTION, said("It is 5."), NEXT]))
    assert together == [*TEMPLATES[name].prompt([QUESTION], ()), *sampled, *delta]


def test_a_reply_in_unusual_tokens_stays_and_changes_nothing_behind_it() -> None:
    usual = ids("qwen2_5", "It is 5.")
    unusual = [token for char in "It is 5." for token in ids("qwen2_5", char)]
    assert unusual != usual
    template = TEMPLATES["qwen2_5"]
    last = end("qwen2_5")
    assert template.delta([*unusual, last], [NEXT], ()) == template.delta(
        [*usual, last], [NEXT], ()
    )
    assert template.reply([*unusual, last]).message == said("It is 5.")


# The end of a turn -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_end_of_a_turn_that_was_not_sampled_is_put_in(name: str) -> None:
    template = TEMPLATES[name]
    reply = ids(name, "I stop</answer>")
    closed = template.delta([*reply, end(name)], [NEXT], ())
    assert template.delta(reply, [NEXT], ()) == [end(name), *closed]


def test_an_end_of_text_that_the_template_does_not_know_ends_no_turn() -> None:
    template = TEMPLATES["qwen2_5"]
    stray = MADE["qwen2_5"].convert_tokens_to_ids("<|endoftext|>")
    delta = template.delta([*ids("qwen2_5", "5"), stray], [NEXT], ())
    assert delta[0] == end("qwen2_5")


def test_either_end_of_llama_s_turns_ends_one() -> None:
    template = TEMPLATES["llama3_1"]
    other = MADE["llama3_1"].convert_tokens_to_ids("<|eom_id|>")
    expected = template.delta([5, end("llama3_1")], [RESULT], [ADD])
    assert template.delta([5, other], [RESULT], [ADD]) == expected


def test_special_tokens_without_a_name_are_known_too() -> None:
    """As in Meta's Llama 3.1: only ``added_tokens_decoder`` has them."""
    tokenizer = make_tokenizer("llama3_1", eos="<|eot_id|>", named=False)
    assert "<|eom_id|>" not in tokenizer.all_special_tokens
    template = Template(tokenizer, {})
    call = tokenizer('{"name": "add", "parameters": {"a": 2}}', add_special_tokens=False)
    replies = [
        [*call["input_ids"], tokenizer.convert_tokens_to_ids(last)]
        for last in ("<|eom_id|>", "<|eot_id|>")
    ]
    first, second = [template.reply(reply).message for reply in replies]
    assert first["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}
    assert first == second
    first, second = [template.delta(reply, [RESULT], [ADD]) for reply in replies]
    assert first == second


def test_an_end_in_plain_text_is_found_in_the_text() -> None:
    text = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }} END\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = make_tokenizer(text)
    template = Template(tokenizer, {})
    assert template.closing == " END"

    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    ended = tokenizer.decode(template.delta(tokens("It is 5. END"), [NEXT], ()))
    assert ended == "\nuser: And 4 + 4? END\nassistant: "
    assert template.reply(tokens("It is 5. END")).message["content"] == "It is 5."
    cut = tokenizer.decode(template.delta(tokens("It is 5."), [NEXT], ()))
    assert cut == " END\nuser: And 4 + 4? END\nassistant: "
    assert tokenizer.decode(template.delta(tokens("BAD"), [NEXT], ())) == cut


def test_a_conversation_s_end_is_not_a_turn_s() -> None:
    text = (
        "{% for m in messages %}{{ '<|start_header_id|>' + m.role + m.content + '<|eot_id|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant' }}"
        "{% else %}{{ '<|endoftext|>' }}{% endif %}"
    )
    tokenizer = make_tokenizer(text)
    template = Template(tokenizer, {})
    assert template.closing == "<|eot_id|>"
    delta = template.delta([5, tokenizer.convert_tokens_to_ids("<|eot_id|>")], [NEXT], ())
    assert tokenizer.decode(delta) == (
        "<|start_header_id|>userAnd 4 + 4?<|eot_id|><|start_header_id|>assistant"
    )


def test_a_token_that_ends_a_turn_and_begins_the_next_is_there_once() -> None:
    text = (
        "{% for m in messages %}{{ {'user': '<|im_start|>', 'assistant': '<|im_end|>', "
        "'tool': '<|eot_id|>'}[m.role] + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_end|>' }}{% endif %}"
    )
    tokenizer = make_tokenizer(text)
    template = Template(tokenizer, {})
    assert template.closing == ""
    asks = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert tokenizer.decode(template.delta([5, asks], [NEXT], ())) == "And 4 + 4?<|im_end|>"
    assert tokenizer.decode(template.delta([5], [NEXT], ())) == "<|im_start|>And 4 + 4?<|im_end|>"


# Replies ---------------------------------------------------------------------------------------


def test_calls_are_read_from_a_reply_with_its_end_or_without() -> None:
    text = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    tokens = ids("qwen3", text)
    message = TEMPLATES["qwen3"].reply([*tokens, end("qwen3")]).message
    assert message == TEMPLATES["qwen3"].reply(tokens).message
    assert message["content"] == "I add."
    assert message["text"] == text
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 2, "b": 3}'}
    assert len(call["id"]) == 9
    assert "bad_calls" not in message
    cut = tokens[: -len(ids("qwen3", "\n</tool_call>"))]
    for last in (end("qwen3"), MADE["qwen3"].convert_tokens_to_ids("<|endoftext|>")):
        assert TEMPLATES["qwen3"].reply([*cut, last]).message["tool_calls"] == [call | {"id": ANY}]


def test_special_tokens_are_read_and_not_shown() -> None:
    template = TEMPLATES["llama3_1"]
    text = '<|python_tag|>{"name": "add", "parameters": {"a": 2}}'
    message = template.reply([*ids("llama3_1", text), end("llama3_1")]).message
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"]["name"] == "add"
    assert "<|" not in message["text"]
    stray = template.reply(ids("llama3_1", "a<|endoftext|>b")).message
    assert stray == said("ab")


OPENED = "{{- '<|im_start|>assistant\\n<think>\\n' }}"
"""How some templates let a reply begin."""
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'


def test_a_template_may_begin_the_reasoning_of_a_reply() -> None:
    text = MADE["qwen3"].get_chat_template()
    before, begins, after = text.rpartition("{{- '<|im_start|>assistant\\n' }}")
    assert begins
    tokenizer = make_tokenizer(f"{before}{OPENED}{after}")
    template = Template(tokenizer, {})
    assert tokenizer.decode(template.prompt([QUESTION], [ADD])).endswith("assistant\n<think>\n")
    thought = template.reply(ids("qwen3", f"I may say {CALL}")).message
    assert "tool_calls" not in thought
    meant = template.reply(ids("qwen3", f"I may say {CALL}</think>{CALL}")).message
    assert len(meant["tool_calls"]) == 1
    without = Template(tokenizer, {"enable_thinking": False})
    assert len(without.reply(ids("qwen3", CALL)).message["tool_calls"]) == 1


def test_what_was_not_understood_is_noted() -> None:
    text = (
        '<tool_call>{"name": "add"</tool_call><tool_call>{"name": "add", "arguments": {}}'
        "</tool_call><tool_call>7</tool_call>"
    )
    message = TEMPLATES["qwen2_5"].reply(ids("qwen2_5", text)).message
    assert [bad["place"] for bad in message["bad_calls"]] == [0, 2]
    assert all(bad["error"] for bad in message["bad_calls"])
    assert len(message["tool_calls"]) == 1


@given(st.lists(st.integers(0, len(MADE["qwen3"]) - 1), max_size=40), st.sampled_from(NAMES))
def test_any_tokens_are_a_reply(tokens: list[int], name: str) -> None:
    message = TEMPLATES[name].reply(tokens).message
    assert message["role"] == "assistant"
    assert isinstance(message["content"], str)
    assert TEMPLATES[name].delta(tokens, [NEXT], ())[-1] == TEMPLATES[name].prompt([NEXT], ())[-1]


# Details ---------------------------------------------------------------------------------------


def test_prompts_have_the_template_s_arguments_and_tools() -> None:
    template = Template(make_tokenizer("qwen3"), {"enable_thinking": False})
    text = MADE["qwen3"].decode(template.prompt([QUESTION], [ADD]))
    assert text.endswith("<think>\n\n</think>\n\n")
    assert '"name": "add"' in text


def test_arguments_in_json_text_are_rendered_as_objects() -> None:
    turn = said("") | {
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}]
    }
    text = MADE["qwen2_5"].decode(TEMPLATES["qwen2_5"].prompt([QUESTION, turn, RESULT], [ADD]))
    assert '{"name": "add", "arguments": {"a": 2}}' in text


def test_half_a_character_becomes_a_question_mark() -> None:
    message = {"role": "user", "content": "a\ud800b"}
    delta = TEMPLATES["qwen2_5"].delta([5], [message], ())
    assert "a?b" in MADE["qwen2_5"].decode(delta)


def test_the_same_answer_is_rendered_once_and_memory_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollpacker.env.template._MOST", 2)
    tokenizer = make_tokenizer("qwen2_5")
    template = Template(tokenizer, {})
    for tools in ([], [ADD]):  # once more for each form of a conversation
        template.delta([5], [NEXT], tools)
    rendered: list[str] = []
    render = tokenizer.apply_chat_template

    def counted(messages: Any, **kwargs: Any) -> Any:
        rendered.append(messages[-1]["content"])
        return render(messages, **kwargs)

    monkeypatch.setattr(tokenizer, "apply_chat_template", counted)
    for text in "aababaca":
        template.delta([5], [{"role": "user", "content": text}], ())
    assert rendered == ["a", "b", "c"]
    template.delta([5], [{"role": "user", "content": "b"}], ())  # not used for longest
    template.delta([5], [{"role": "user", "content": "b"}], [ADD])
    assert rendered == ["a", "b", "c", "b", "b"]


def test_every_special_token_of_the_tests_is_one() -> None:
    for token in SPECIAL:
        assert MADE["qwen2_5"].convert_tokens_to_ids(token) in MADE["qwen2_5"].all_special_ids
