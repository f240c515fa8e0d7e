"""Whatever rows hold: they are loaded and encoded, or one clear line says why not."""

import json
import sys
from types import ModuleType

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_encode import tokenizer

from rollpacker.config import DataConfig
from rollpacker.core.types import Prompt
from rollpacker.data.base import DataError
from rollpacker.data.encode import encode_prompts
from rollpacker.data.held_out import hold_out
from rollpacker.data.load import load_rows
from rollpacker.data.source import PromptSource

COLUMNS = (
    *("prompt", "question", "messages", "answer", "ground_truth", "label", "solution", "id"),
    *("reward_model", "data_source", "datasource", "tag", "tools", "chat_template_kwargs"),
    *("images", "extra_info", "rg_task", "instruction", "input", "context", "conversations"),
    *("system", "system_prompt", "history", "choices", "starter_code", "query", "response"),
)
TEXT = st.text(max_size=8) | st.sampled_from(["[{", "[{}]", "{", "[]", '{"a": 1}', "\ud800"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
TURN = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "tool", None, 3]),
        "content": LEAVES | st.lists(st.fixed_dictionaries({"type": TEXT, "text": TEXT})),
        "tool_calls": LEAVES | st.lists(st.dictionaries(TEXT, LEAVES, max_size=2), max_size=2),
        "name": LEAVES,
        "from": st.sampled_from(["human", "gpt", "system", None]),
        "value": LEAVES,
    },
)
CHAT = st.lists(TURN, max_size=3)
GOOD = st.lists(
    st.builds(
        lambda role, text: {"role": role, "content": text},
        st.sampled_from(["user", "assistant"]),
        TEXT,
    ),
    max_size=3,
)
MODEL = st.fixed_dictionaries({}, optional={"ground_truth": LEAVES, "style": LEAVES})
VALUES = (
    LEAVES
    | CHAT
    | GOOD
    | GOOD.map(json.dumps)
    | GOOD.map(str)
    | MODEL
    | MODEL.map(json.dumps)
    | st.lists(LEAVES, max_size=2)
    | st.dictionaries(TEXT, LEAVES, max_size=2)
)
KEYS = st.none() | st.sampled_from(["", "prompt", "label", "messages", "reward_model.ground_truth"])
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "input_key": KEYS,
        "label_key": KEYS,
        "domain_key": KEYS,
        "missing": st.sampled_from(["error", "skip"]),
        "overlong": st.sampled_from(["error", "skip"]),
        "size": st.integers(0, 3),
        "chat": st.none() | st.booleans(),
        "system_prompt": st.none() | TEXT,
        "prompt_template": st.none() | st.just("Q: {prompt}"),
    },
)
ROWS = st.lists(st.dictionaries(st.sampled_from(COLUMNS), VALUES, max_size=5), max_size=4)
LIKELY = st.fixed_dictionaries(
    {"prompt": TEXT | GOOD, "answer": TEXT},
    optional={name: VALUES for name in ("tools", "chat_template_kwargs", "id", "datasource")},
)
MANY = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def tokenizers():
    return tokenizer(), tokenizer(None)


def load_and_encode(path: str, chosen: dict, tokenizers) -> None:
    config = DataConfig(path=path, **chosen)
    for each in tokenizers:
        try:
            rows = load_rows(config).rows
            encoded = encode_prompts(rows, each, config, 20, 0)
            assert set(encoded.tokens) | set(encoded.skipped) == {row.id for row in rows}
            PromptSource([Prompt(id=row.id, domain=row.domain) for row in rows], 0)
            hold_out(rows, 0.5, 0)
            said = ""
        except DataError as error:
            said = str(error)
        assert "\n" not in said
        assert len(said) < 1000
        assert not said or said.startswith((path, "data.", "row '", "eval."))


@given(rows=ROWS | st.lists(LIKELY, max_size=4), chosen=SETTINGS)
@MANY
def test_any_json_is_loaded_or_refused_in_one_line(tmp_path, tokenizers, rows, chosen):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    load_and_encode(str(path), chosen, tokenizers)


ODD = st.sampled_from([b"x", np.zeros(2), np.float32(1), {1: "a", "b": 2}, {3}, object(), (1, 2)])


@given(
    rows=st.lists(st.dictionaries(st.sampled_from(COLUMNS), VALUES | ODD, max_size=5), max_size=3)
    | st.lists(st.fixed_dictionaries({"prompt": TEXT, "answer": ODD, "id": ODD}), max_size=3),
    chosen=SETTINGS,
)
@MANY
def test_any_python_values_are_loaded_or_refused_in_one_line(tokenizers, rows, chosen):
    sys.modules["odd_rows"] = module = ModuleType("odd_rows")
    vars(module)["rows"] = lambda: rows
    load_and_encode("odd_rows:rows", chosen, tokenizers)


@given(data=st.binary(max_size=60))
@MANY
@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "parquet", "arrow", "jsonl.gz"])
def test_any_bytes_are_loaded_or_refused_in_one_line(tmp_path, tokenizers, kind, data):
    path = tmp_path / f"rows.{kind}"
    path.write_bytes(data)
    load_and_encode(str(path), {}, tokenizers)
