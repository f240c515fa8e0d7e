from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rollpacker.config import DataConfig
from rollpacker.core.types import PromptId
from rollpacker.data.base import DataError, Row
from rollpacker.data.encode import encode_prompts

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if thinking %} <think>{% endif %}"
)


def tokenizer(template: str | None = TEMPLATE):
    words = ["<unk>", "<bos>", "<end>", "<system>", "<user>", "<assistant>", "<think>"]
    words += ["one", "two", "three", "be", "brief", "Q:"]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<bos>")
    fast.chat_template = template
    return fast


def row(prompt, name="r") -> Row:
    return Row(id=PromptId(name), prompt=prompt, answer="1", domain="default", columns={})


CHAT = [{"role": "user", "content": "one two"}]


def encode(prompt, tok=None, max_context=100, kwargs=None, **settings) -> str:
    tok = tok or tokenizer()
    config = DataConfig(path="x", **settings)
    encoded = encode_prompts([row(prompt)], tok, config, max_context, 1, kwargs)
    ids = encoded.tokens[PromptId("r")]
    assert ids.dtype == np.int32
    return " ".join(tok.convert_ids_to_tokens(ids.tolist()))


def test_strings_take_the_chat_template_when_there_is_one():
    assert encode("one two") == "<user> one two <end> <assistant>"
    assert encode("one two", tokenizer(None)) == "<bos> one two"
    assert encode("one two", chat=False) == "<bos> one two"
    assert encode("one two", chat=True) == "<user> one two <end> <assistant>"


def test_a_text_that_is_rendered_already_is_taken_as_it_is():
    """A second rendering would put the prompt into a turn within a turn, with two beginnings."""
    rendered = "<user> one <end> <assistant>"
    special = tokenizer()
    special.add_special_tokens({"additional_special_tokens": ["<user>", "<system>"]})
    for tok in (tokenizer(), special):
        for text in (rendered, f"<bos> {rendered}"):
            assert encode(text, tok) == f"<bos> {rendered}"
            assert encode(text, tok, chat=False) == f"<bos> {rendered}"
        assert encode("one <user>", tok) == "<user> one <user> <end> <assistant>"
    assert encode("<bos> one", tokenizer(None)) == "<bos> one"
    both = [row("one", "a"), row(rendered, "b"), row(CHAT, "c")]
    encoded = encode_prompts(both, tokenizer(), DataConfig(path="x"), 100, 1)
    assert [len(ids) for ids in encoded.tokens.values()] == [4, 5, 5]
    for key, value in (("chat", True), ("system_prompt", "be"), ("prompt_template", "Q {prompt}")):
        with pytest.raises(
            DataError, match=f"row 'r': .* begins with '<user>', .*: remove data.{key}"
        ):
            encode(rendered, **{key: value})


def test_messages_system_prompt_and_shots():
    assert encode(CHAT) == "<user> one two <end> <assistant>"
    shots = [{"role": "user", "content": "two"}, {"role": "assistant", "content": "three"}]
    expected = (
        "<system> be brief <end> <user> two <end> <assistant> three <end> "
        "<user> one two <end> <assistant>"
    )
    assert encode(CHAT, system_prompt="be brief", shots=shots) == expected
    own = [{"role": "system", "content": "three"}, *CHAT]
    assert encode(own, system_prompt="be brief", shots=shots) == expected
    assert encode(own, shots=shots).startswith("<system> three <end> <user> two")


def test_template_arguments_and_the_prompt_template():
    assert encode(CHAT, kwargs={"thinking": True}).endswith("<assistant> <think>")
    assert encode("one", prompt_template="Q: {prompt} {}", chat=False) == "<bos> Q: one <unk>"
    asked = "<user> Q: one two <end> <assistant>"
    assert encode(CHAT, prompt_template="Q: {prompt}") == asked
    turns = [*CHAT, {"role": "assistant", "content": "three"}, *CHAT]
    said = "<user> one two <end> <assistant> three <end>"
    assert encode(turns, prompt_template="Q: {prompt}") == f"{said} {asked}"


def test_a_prompt_template_without_a_place_is_refused():
    turns = [*CHAT, {"role": "tool", "content": "three"}]
    assert message(turns, prompt_template="Q: {prompt}") == (
        "row 'r': data.prompt_template needs a last turn of the user, but the prompt ends "
        "with a turn of role 'tool': remove it"
    )


def test_messages_without_the_chat_template():
    assert encode(CHAT, chat=False) == encode("one two", chat=False) == "<bos> one two"
    assert encode(CHAT, tokenizer(None), chat=False, prompt_template="Q: {prompt}") == (
        encode("Q: one two", chat=False)
    )
    said = "without a chat template, a prompt is one turn of the user"
    for before in ({"role": "system", "content": "three"}, {"role": "assistant", "content": "x"}):
        assert message([before, *CHAT], chat=False) == (
            f"row 'r': its prompt has turns of {before['role']}, user, and data.chat is false: "
            f"{said}"
        )


def test_arguments_that_no_template_reads():
    with pytest.raises(DataError, match="the chat template reads no 'thinkin': correct or remove"):
        encode(CHAT, kwargs={"thinkin": True})
    with pytest.raises(DataError, match="chat_template_kwargs needs prompts that take the chat"):
        encode("one", kwargs={"thinking": True}, chat=False)


def test_rows_of_both_kinds_keep_their_order():
    rows = [row("one", "a"), row(CHAT, "b"), row("two", "c")]
    tok = tokenizer()
    encoded = encode_prompts(rows, tok, DataConfig(path="x", chat=False), 100, 1)
    assert list(encoded.tokens) == ["a", "b", "c"]
    assert encoded.tokens[PromptId("c")].tolist() == tok("two")["input_ids"]


def message(prompt, tok=None, **settings) -> str:
    with pytest.raises(DataError) as caught:
        encode(prompt, tok, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_needs_a_template_says_so():
    assert message(CHAT, tokenizer(None)) == (
        "row 'r': its prompt is chat messages but the tokenizer has no chat template: "
        "use one that has, or set data.chat: false if prompts are one turn of the user"
    )
    assert message("one", tokenizer(None), chat=True) == (
        "data.chat: true, but the tokenizer has no chat template: set it to false"
    )
    assert message("one", tokenizer(None), system_prompt="be").startswith(
        "data.system_prompt needs a chat template"
    )
    assert message("one", prompt_template="Q:") == (
        "data.prompt_template: it does not contain {prompt}"
    )
    refusing = tokenizer("{{ raise_exception('roles must\nalternate') }}")
    assert message(CHAT, refusing) == (
        "row 'r': the chat template refuses it: roles must alternate"
    )


def test_long_prompts_are_refused_or_skipped():
    assert message("one " * 50, chat=False, max_context=51) == (
        "row 'r': its prompt of 51 tokens leaves no room for a response in the context of 51: "
        "set data.overlong: skip to leave it out"
    )
    rows = [row("one " * 50, "long"), row("one", "short")]
    config = DataConfig(path="x", overlong="skip", chat=False)
    encoded = encode_prompts(rows, tokenizer(), config, 51, 1)
    assert (list(encoded.tokens), encoded.skipped) == (["short"], ("long",))
    assert list(encode_prompts(rows, tokenizer(), config, 52, 1).tokens) == ["long", "short"]
    with pytest.raises(DataError, match="no prompt fits the context of 40 tokens"):
        encode_prompts(rows, tokenizer(), config, 40, 39)


TOOLS_TEMPLATE = "{% if tools %}<system> {{ tools | length }} {% endif %}" + TEMPLATE
TOOL = {"type": "function", "function": {"name": "one", "parameters": {"type": "object"}}}


def encoded(one: Row, tok, **settings) -> str:
    kwargs = {} if settings.get("chat") is False else {"thinking": True}
    ids = encode_prompts([one], tok, DataConfig(path="x", **settings), 100, 0, kwargs)
    return " ".join(tok.convert_ids_to_tokens(ids.tokens[one.id].tolist()))


def test_a_row_s_own_tools_and_template_arguments():
    tools = replace(row(CHAT), tools=[TOOL])
    tok = tokenizer(TOOLS_TEMPLATE)
    asked = "<user> one two <end> <assistant>"
    assert encoded(tools, tok) == f"<system> <unk> {asked} <think>"
    assert encoded(row(CHAT), tok) == f"{asked} <think>"
    assert encoded(replace(row(CHAT), template_kwargs={"thinking": False}), tok) == asked
    assert encoded(replace(row("one two"), tools=[TOOL]), tok).startswith("<system> <unk> <user>")


def test_tools_and_arguments_that_nothing_reads_are_refused():
    tools = replace(row(CHAT), tools=[TOOL])
    with pytest.raises(DataError, match="row 'r': it has tools, but the tokenizer's chat template"):
        encoded(tools, tokenizer())
    plain = replace(row("one"), template_kwargs={"thinking": False})
    for one, column in ((replace(tools, prompt="one"), "tools"), (plain, "chat_template_kwargs")):
        with pytest.raises(DataError, match=f"its column '{column}' is for a chat template"):
            encoded(one, tokenizer(), chat=False)


def test_the_configured_length_is_blamed_where_it_is_the_cause():
    rows = [row("one " * 50, "long"), row("one " * 60, "longer"), row("one", "short")]
    config = DataConfig(path="x", chat=False)
    with pytest.raises(DataError) as caught:
        encode_prompts(rows, tokenizer(), config, 100, 60)
    assert str(caught.value) == (
        "row 'longer': its prompt of 61 tokens, the longest of 2 such, leaves 39 of the context of "
        "100 for a response: lower rollout.max_completion_length from 60, or set data.overlong: "
        "skip to leave them out"
    )
    assert len(encode_prompts(rows, tokenizer(), config, 100, 39).tokens) == 3
    assert len(encode_prompts(rows, tokenizer(), config, 100, 0).tokens) == 3
