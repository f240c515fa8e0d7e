"""Records as JSON: every value comes back as it was; sampling seeds are the same everywhere."""

import json
import math
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import NewType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.core import codec
from rollpacker.core.types import PromptId, sampling_seed

Key = NewType("Key", str)


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    size: int
    share: float = 0.5

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size must be 0 or more, got {self.size}")


class Outer(codec.Tagged, frozen=True, kw_only=True):
    key: Key
    parts: tuple[Inner, ...]
    colour: Colour = Colour.RED
    seconds: float | None = None


class Empty(codec.Tagged, frozen=True, kw_only=True):
    pass


KINDS = codec.kinds(Outer | Empty)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
any_text = st.text(st.characters(codec=None, exclude_categories=()))


@given(value=values | any_text | st.dictionaries(any_text, any_text))
def test_plain_values_come_back_and_json_reads_and_writes_the_same(value: object) -> None:
    text = codec.dumps(value)
    assert b"\n" not in text
    assert codec.loads(text) == json.loads(text) == value
    assert codec.loads(json.dumps(value)) == value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float64("nan"), None, 1e-7])
def test_a_number_that_is_not_finite_comes_back(value: float | None) -> None:
    made = Outer(key=Key("k"), parts=(Inner(size=3),), seconds=value)
    back = codec.load_tagged(codec.loads(codec.dumps(made)), KINDS)
    assert repr(back) == repr(Outer(key=made.key, parts=made.parts, seconds=value and float(value)))
    assert type(back.colour) is Colour


def test_numbers_of_numpy_and_of_any_size() -> None:
    assert codec.dumps({"a": np.float64(0.1), "b": 2**127}) == b'{"a":0.1,"b":%d}' % 2**127
    assert codec.loads(b"%d" % 2**127) == 2**127
    with pytest.raises(TypeError, match="cannot write int64 as JSON"):
        codec.dumps(np.int64(1))


def test_the_kind_comes_first_and_a_class_without_fields_has_nothing_else() -> None:
    assert codec.dumps([Empty()]) == b'[{"kind":"Empty"}]'
    assert codec.load_tagged({"kind": "Empty"}, KINDS) == Empty()


def test_fields_of_other_versions() -> None:
    data = {"kind": "Outer", "key": "k", "parts": [{"size": 1, "new": 2}], "newer": {}}
    assert codec.load_tagged(data, KINDS) == Outer(key=Key("k"), parts=(Inner(size=1),))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"kind": "Outer", "parts": []}, "Outer: .*`key`"),
        ({"kind": "Outer", "key": "k", "parts": [{"size": "1"}]}, r"Outer: .*parts\[0\].size"),
        ({"kind": "Outer", "key": "k", "parts": [{"size": -1}]}, "size must be 0 or more, got -1"),
        ({"kind": "Outer", "key": "k", "parts": [], "colour": "x"}, "'x'"),
        ({}, "unknown kind ''; known: Empty, Outer"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(data: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        codec.load_tagged(data, KINDS)
    assert "\n" not in str(error.value)


def test_a_bad_line_of_a_file_is_named_and_a_torn_last_one_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'{"a":NaN}\n[1]\n{"a":')
    (_, first), second = codec.read_lines(path)
    assert math.isnan(first["a"])
    assert second == (2, [1])
    for wrong in (b'{"a"\n', b"\xff\n", b"\n", b"1 2\n"):
        path.write_bytes(b"1\n" + wrong)
        with pytest.raises(ValueError, match=r"lines, line 2: not JSON \(.+\)$"):
            list(codec.read_lines(path))


# Sampling seeds: the same on every machine, and spread over 63 bits.


def test_the_seed_of_an_attempt_never_changes_between_versions() -> None:
    assert sampling_seed(0, 1, PromptId("a"), 0) == 8_825_198_516_911_814_056


@given(
    seed=st.integers(0, 2**40),
    step=st.integers(0, 10**6),
    prompt=st.text().map(PromptId),
    index=st.integers(0, 4096),
)
def test_a_seed_depends_on_its_arguments_only(
    seed: int, step: int, prompt: PromptId, index: int
) -> None:
    first = sampling_seed(seed, step, prompt, index)
    assert first == sampling_seed(seed, step, prompt, index)
    assert 0 <= first < 2**63


def test_neighbouring_attempts_get_unrelated_seeds() -> None:
    prompts = [PromptId(text) for text in ("0", "1", "1/0", "0/1")]
    arguments = list(product(range(4), range(8), prompts, range(8)))
    seeds = [sampling_seed(*each) for each in arguments]
    assert len(set(seeds)) == len(arguments)
    for bit in range(63):
        share = sum(seed >> bit & 1 for seed in seeds) / len(seeds)
        assert 0.4 < share < 0.6, f"bit {bit} is set in {share:.2f} of the seeds"
