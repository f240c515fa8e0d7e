"""What is found out about a chat template at the start."""

import pytest
from chat_models import ADD, NAMES, make_tokenizer
from test_template import CALLING, NEXT, QUESTION, RESULT, TEMPLATES, joined, said, whole
from tokenizers import pre_tokenizers

from rollpacker.env.base import EpisodeError
from rollpacker.env.template import Template
from rollpacker.env.template_check import check


def test_what_a_template_changes_is_named() -> None:
    plain = check(TEMPLATES["qwen3"], [])
    assert len(plain) == 1
    assert "changes the reasoning of earlier turns when a user message follows" in plain[0]
    assert "kept as it was sampled" in plain[0]
    (line,) = check(TEMPLATES["llama3_1"], [ADD])
    assert "changes the reasoning of earlier turns when a tool answers" in line
    for name in ("qwen2_5", "qwen3_instruct_2507"):
        assert check(TEMPLATES[name], []) == check(TEMPLATES[name], [ADD]) == []


def test_the_reasoning_that_was_sampled_stays() -> None:
    reply = "<think>\nAdd them.\n</think>\n\nIt is 5."
    assert reply in joined("qwen3", reply, [NEXT])
    assert reply not in whole("qwen3", [QUESTION, said(reply), NEXT])


def test_thinking_that_is_switched_off_is_no_reasoning_but_a_change() -> None:
    template = Template(make_tokenizer("qwen3"), {"enable_thinking": False})
    (line,) = check(template, [])
    assert "changes earlier replies" in line
    assert r"<think>\n\n</think>" in line


def test_calls_that_a_template_writes_in_another_way_are_named() -> None:
    lines = check(Template(make_tokenizer("qwen2_5"), {}, call_format="llama3"), [ADD])
    assert lines[-1].startswith("environment: the chat template changes calls of tools")


def test_templates_without_a_place_for_tools_say_so() -> None:
    for name in ("smollm2", "llama3"):
        lines = check(TEMPLATES[name], [ADD])
        assert "has no place for tools" in lines[0]
        assert "calls are read as hermes" in lines[1]
        assert len(lines) == 2
        assert check(TEMPLATES[name], []) == []


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
    assert check(template, []) == []
    with pytest.raises(ValueError, match=r"^environment.call_format: .* \(hermes, llama3, "):
        check(template, [ADD])
    assert check(Template(make_tokenizer(UNKNOWN), {}, call_format="hermes"), [ADD])


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
    assert any("no place for messages of role tool" in line for line in check(template, [ADD]))
    closed = tokenizer.convert_tokens_to_ids("<|im_end|>")
    delta = template.delta([5, closed], [RESULT, RESULT, NEXT, RESULT], [ADD])
    assert tokenizer.decode(delta) == (
        "\n<|im_start|>user\n<tool_response>\n5\n</tool_response>\n<tool_response>\n5\n"
        "</tool_response><|im_end|>\n<|im_start|>user\nAnd 4 + 4?<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n"
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
    assert check(template, [ADD]) == []
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
    with pytest.raises(ValueError, match="cannot render an environment's answers: it leaves it"):
        Template(make_tokenizer(text), {})


def test_what_the_template_refuses_is_the_episode_s_error() -> None:
    text = REFUSING.replace("'tool'", "'system'")
    template = Template(make_tokenizer(text), {})
    system = {"role": "system", "content": "Be brief."}
    with pytest.raises(EpisodeError, match=r"^the chat template refuses .*: unknown role$"):
        template.delta([5], [system], ())
    with pytest.raises(EpisodeError, match=r"^the chat template refuses .*: unknown role$"):
        template.prompt([system], ())


def test_a_tokenizer_that_splits_pieces_otherwise_is_named() -> None:
    text = "{% for m in messages %}{{ m.role + m.content }}|END|{% endfor %}"
    text += "{% if add_generation_prompt %}assistant{% endif %}"
    tokenizer = make_tokenizer(text)
    assert check(Template(tokenizer, {}), []) == []
    spaced = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.backend_tokenizer.pre_tokenizer = spaced
    (line,) = check(Template(tokenizer, {}), [])
    assert "splits the text after a reply differently when it stands alone" in line
