"""The chat template between messages and tokens: nothing is tokenised twice."""

from typing import Any

import pytest
from chat_models import ADD, NAMES, SPECIAL, make_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.env.base import EpisodeError
from rollpacker.env.calls import Call, written
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
    call = Call("add", {"a": 2, "b": 3})
    turn = said("") | {
        "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
        ]
    }
    expected = whole(name, [QUESTION, turn, *[RESULT] * count], [ADD])
    form = TEMPLATES[name].call_format
    assert form is not None
    found = joined(name, written(call, form), [RESULT] * count, [ADD])
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


def test_special_tokens_are_read_and_not_shown() -> None:
    template = TEMPLATES["llama3_1"]
    text = '<|python_tag|>{"name": "add", "parameters": {"a": 2}}'
    message = template.reply([*ids("llama3_1", text), end("llama3_1")]).message
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"]["name"] == "add"
    assert "<|" not in message["text"]
    stray = template.reply(ids("llama3_1", "a<|endoftext|>b")).message
    assert stray == said("ab")


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


# What is found at the start --------------------------------------------------------------------


def test_what_a_template_changes_is_named() -> None:
    plain = TEMPLATES["qwen3"].check([])
    assert len(plain) == 1
    assert "changes the reasoning of earlier turns when a user message follows" in plain[0]
    assert "kept as it was sampled" in plain[0]
    (line,) = TEMPLATES["llama3_1"].check([ADD])
    assert "changes the reasoning of earlier turns when a tool answers" in line
    for name in ("qwen2_5", "qwen3_instruct_2507"):
        assert TEMPLATES[name].check([]) == TEMPLATES[name].check([ADD]) == []


def test_the_reasoning_that_was_sampled_stays() -> None:
    reply = "<think>\nAdd them.\n</think>\n\nIt is 5."
    assert reply in joined("qwen3", reply, [NEXT])
    assert reply not in whole("qwen3", [QUESTION, said(reply), NEXT])


def test_thinking_that_is_switched_off_is_no_reasoning_but_a_change() -> None:
    template = Template(make_tokenizer("qwen3"), {"enable_thinking": False})
    (line,) = template.check([])
    assert "changes earlier replies" in line
    assert r"<think>\n\n</think>" in line


def test_calls_that_a_template_writes_in_another_way_are_named() -> None:
    assert (
        Template(make_tokenizer("qwen2_5"), {}, call_format="llama3")
        .check([ADD])[-1]
        .startswith("environment: the chat template changes calls of tools")
    )


def test_templates_without_a_place_for_tools_say_so() -> None:
    for name in ("smollm2", "llama3"):
        lines = TEMPLATES[name].check([ADD])
        assert "has no place for tools" in lines[0]
        assert "calls are read as hermes" in lines[1]
        assert len(lines) == 2
        assert TEMPLATES[name].check([]) == []


@pytest.mark.parametrize("name", NAMES)
def test_the_format_of_calls_is_the_template_s(name: str) -> None:
    expected = "llama3" if name == "llama3_1" else "hermes"
    assert TEMPLATES[name].call_format == expected
    assert TEMPLATES[name].guessed is (name not in CALLING)


UNKNOWN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}{% endfor %}
<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_calls_in_a_format_that_is_unknown_need_one_to_be_named() -> None:
    template = Template(make_tokenizer(UNKNOWN), {})
    assert template.check([]) == []
    with pytest.raises(ValueError, match=r"^environment.call_format: .* \(hermes, llama3\)"):
        template.check([ADD])
    assert Template(make_tokenizer(UNKNOWN), {}, call_format="hermes").check([ADD])


def test_no_chat_template_is_said() -> None:
    tokenizer = make_tokenizer(None)
    with pytest.raises(ValueError, match=r"^environment: the tokenizer of model.path has no chat"):
        Template(tokenizer, {})


TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
GOES_ON = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
REFUSING = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('unknown role') }}"
    f"{{% endif %}}{TURN}{{% endfor %}}{GOES_ON}"
)
SILENT = REFUSING.replace("{{ raise_exception('unknown role') }}{% endif %}", "{% else %}")
SILENT = SILENT.replace("{% endfor %}", "{% endif %}{% endfor %}")


@pytest.mark.parametrize("text", [REFUSING, SILENT])
def test_tools_answer_as_the_user_where_there_is_no_such_role(text: str) -> None:
    tokenizer = make_tokenizer(text)
    template = Template(tokenizer, {})
    assert template.results == "user"
    assert any("no place for messages of role tool" in line for line in template.check([ADD]))
    closed = tokenizer.convert_tokens_to_ids("<|im_end|>")
    delta = template.delta([5, closed], [RESULT, RESULT, NEXT], [ADD])
    assert tokenizer.decode(delta) == (
        "\n<|im_start|>user\n<tool_response>\n5\n</tool_response>\n<tool_response>\n5\n"
        "</tool_response><|im_end|>\n<|im_start|>user\nAnd 4 + 4?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


NEEDS_CALLS = """{% set ns = namespace(calls=false) %}
{%- for t in tools or [] %}{{ t.function.name }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if not ns.calls %}{{ raise_exception('a tool answers without a call') }}{% endif %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}
{{- '<|im_start|>' + m.tool_call_id + m.content + '<|im_end|>' }}
{%- else %}
{%- set ns.calls = m.tool_calls is defined %}
{{- '<|im_start|>' + m.role + m.content }}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>{"name": "' + c.function.name + '", "arguments": ' }}
{{- (c.function.arguments | tojson) + '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"""


def test_a_template_that_wants_calls_before_their_answers_has_some() -> None:
    tokenizer = make_tokenizer(NEEDS_CALLS)
    template = Template(tokenizer, {})
    assert template.results == "calls"
    assert template.check([ADD]) == []
    answers = [RESULT, RESULT | {"content": "6", "tool_call_id": "123456789"}]
    closed = tokenizer.convert_tokens_to_ids("<|im_end|>")
    behind = "<|im_start|>abcdef1235<|im_end|><|im_start|>1234567896<|im_end|><|im_start|>assistant"
    assert tokenizer.decode(template.delta([5, closed], answers, [ADD])) == behind
    assert tokenizer.decode(template.delta([5], answers, [ADD])) == f"<|im_end|>{behind}"


ONE_TURN = """{% if messages | length > 1 %}{{ raise_exception('one turn only') }}{% endif %}
{{ messages[0].content }}"""


def test_a_template_of_one_turn_is_refused() -> None:
    with pytest.raises(ValueError, match=r"several turns: one turn only$"):
        Template(make_tokenizer(ONE_TURN), {})


def test_a_template_that_knows_nothing_but_system_messages_behind_a_reply_is_refused() -> None:
    # Of what comes behind the first reply, only what the first user says again is written.
    text = (
        "{% for m in messages %}{% if loop.index0 < 2 or m.content == messages[0].content %}"
        "{{ m.role + m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(ValueError, match="cannot render what an environment answers: it leaves it"):
        Template(make_tokenizer(text), {})


def test_what_the_template_refuses_is_the_episode_s_error() -> None:
    text = REFUSING.replace("'tool'", "'system'")
    template = Template(make_tokenizer(text), {})
    system = {"role": "system", "content": "Be brief."}
    with pytest.raises(EpisodeError, match=r"^the chat template refuses .*: unknown role$"):
        template.delta([5], [system], ())
    with pytest.raises(EpisodeError, match=r"^the chat template refuses .*: unknown role$"):
        template.prompt([system], ())


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
    rendered: list[str] = []
    render = tokenizer.apply_chat_template

    def counted(messages: Any, **kwargs: Any) -> Any:
        rendered.append(messages[-1]["content"])
        return render(messages, **kwargs)

    monkeypatch.setattr(tokenizer, "apply_chat_template", counted)
    for text in "aabababc":
        template.delta([5], [{"role": "user", "content": text}], ())
    assert rendered == ["a", "b", "c"]
    template.delta([5], [{"role": "user", "content": "a"}], ())  # the oldest one has gone
    template.delta([5], [{"role": "user", "content": "a"}], [ADD])
    assert rendered == ["a", "b", "c", "a", "a"]


def test_every_special_token_of_the_tests_is_one() -> None:
    for token in SPECIAL:
        assert MADE["qwen2_5"].convert_tokens_to_ids(token) in MADE["qwen2_5"].all_special_ids
