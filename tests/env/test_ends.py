"""Whether what ends a response is what the chat template ends a turn with, said before a run."""

import pytest
from chat_models import NAMES, make_tokenizer

from rollpacker.config import RunConfig, parse
from rollpacker.job.plan.checks import check_ends
from rollpacker.train.model.loading import Card

ENDS = {name: "<|eot_id|>" if name.startswith("llama") else "<|im_end|>" for name in NAMES}


def job(**settings) -> RunConfig:
    tree = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"function": "math"}]}
    return parse(tree | settings)


def card(template: str | None, *ends: str) -> Card:
    """Of a checkpoint whose configuration and tokenizer say that these tokens end a response."""
    tokenizer = make_tokenizer(template)
    ids = tuple(tokenizer.convert_tokens_to_ids(list(ends)))
    return Card(
        kind="qwen2", tokenizer=tokenizer, context=100, heads=1, kv_heads=1, stop_token_ids=ids
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_end_of_a_turn_that_ends_no_response(name):
    end = ENDS[name]
    assert check_ends(job(), card(name, "<|endoftext|>", "<|begin_of_text|>")) == [
        f"model.path: its chat template ends a turn with '{end}', but responses end only with "
        f"'<|endoftext|>' or '<|begin_of_text|>': if they are cut off, set rollout.stop: ['{end}']"
    ]
    assert not check_ends(job(rollout={"stop": [end]}), card(name, "<|endoftext|>"))
    assert not check_ends(job(), card(name, "<|endoftext|>", end))


def test_an_end_that_is_no_token():
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}<eom>\n{% endfor %}"
    (line,) = check_ends(job(), card(plain, "<|endoftext|>"))
    assert "ends a turn with '<eom>'" in line
    assert line.endswith("set rollout.stop: ['<eom>']")


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}",
        "{{ raise_exception('no assistant') }}",
        "{{ messages[0].content }}",
    ],
)
def test_nothing_is_said_of_templates_that_say_nothing_else(template):
    assert not check_ends(job(), card(template, "<|endoftext|>"))


def test_the_template_s_own_arguments_count():
    template = "{% for m in messages %}{{ m.content }}{{ end }}{% endfor %}"
    settings = {"model": {"path": "m", "chat_template_kwargs": {"end": "<|im_end|>"}}}
    assert "'<|im_end|>'" in check_ends(job(**settings), card(template, "<|endoftext|>"))[0]


def test_plain_prompts_of_a_model_that_ends_turns_only():
    plain = job(data={"path": "d", "chat": False})
    (line,) = check_ends(plain, card("qwen2_5", "<|im_end|>"))
    assert line.startswith("data.chat is false, but responses end only with '<|im_end|>', which")
    assert not check_ends(plain, card("qwen2_5", "<|im_end|>", "<|endoftext|>"))
    assert not check_ends(plain, card(None, "<|endoftext|>"))


def test_no_end_at_all():
    (line,) = check_ends(job(), card(None))
    assert "names an end token, so every response is cut off: set rollout.stop" in line
    assert not check_ends(job(engine={"kind": "fake"}), card(None))
    assert not check_ends(job(devices={"emulate": "e.yaml", "per_node": 1}), card(None))
