"""Translating what no example has: mistakes, words of a shell, any value of any key."""

import contextlib
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from case_files import read_table
from rollpacker.cli.convert import CommandLine, render, script, translate, trl, verl
from rollpacker.cli.convert.table import Draft, Unknown, fill, resolved
from rollpacker.config.reading import KEYS

FILES = Path(__file__).parent / "files"
NOTHING = CommandLine()


@pytest.mark.parametrize(
    ("name", "text", "said"), read_table(__file__, "test_what_is_no_job_is_one_line")
)
def test_what_is_no_job_is_one_line(tmp_path, name, text, said):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        translate(file, NOTHING)
    assert said in str(error.value)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *read_table(__file__, "test_words_of_the_shell"),
        ("x.y=${UNSET}", Unknown("${UNSET}")),
        ("x.y=$(hostname -s)", Unknown("$(hostname_-s)")),
        ("x.y=$((1 / 0))", Unknown("$((1/0))")),
    ],
)
def test_words_of_the_shell(text, value):
    found = script.overrides(text)["x.y"]
    assert (found, type(found)) == (value, type(value))


def test_references_between_keys():
    given = {"a": "${b}", "b": 1, "c": "${oc.select:b,2}", "d": "${oc.select:x, 2}", "e": "${e}"}
    assert resolved(given | {"f": "p/${b}", "g": "${.b}", "h": "???"}) == given | {
        "a": 1,
        "c": 1,
        "d": 2,
        "f": "p/1",
        "g": "${.b}",
        "h": "???",
    }


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, 2, 8, 256, 0.1, 1.0, "grpo", "vllm", "no", "a\nb: # c", [], {}, ["a"]]),
    st.text(max_size=5),
)


@pytest.mark.parametrize("table", [verl.table(), trl.table()], ids=["verl", "TRL"])
@settings(max_examples=settings().max_examples)
@given(data=st.data())
def test_whatever_the_values_each_key_is_somewhere_once(table, data):
    known = sorted({key.replace("*", "x") for key in table.rows})
    keys = data.draw(st.dictionaries(st.sampled_from([*known, "new.key"]), VALUES, max_size=12))
    draft = Draft(table, "f", {"algorithm.adv_estimator": "grpo"} | keys, NOTHING)
    with contextlib.suppress(ValueError):  # the mistakes of a user
        fill(draft)
        found = [*draft.translated, *draft.ignored, *draft.refused]
        assert sorted(found) == sorted(draft.given)
        tree = yaml.safe_load(render(draft))
        assert set(tree) == {path.partition(".")[0] for path in draft.settings}
        assert tree["rollout"] == {
            path.partition(".")[2]: setting.value
            for path, setting in draft.settings.items()
            if path.startswith("rollout.") and "dynamic" not in path
        } | {k: v for k, v in tree["rollout"].items() if k == "dynamic_sampling"}


def test_hints_for_unknown_keys_are_what_files_are_translated_to():
    """Of every key of the examples that the hints know."""
    ours: dict[str, set[str]] = {}
    for path in sorted(FILES.iterdir()):
        for key, setting in translate(path, CommandLine(reward="math")).settings.items():
            for name in setting.keys:
                ours.setdefault(name.rpartition(".")[2], set()).add(key)
    # The one says whether there are evaluations, and the hint is where that is said here; the other
    # how many prompts are drawn at a time, where groups are filtered.
    known = (ours.keys() & KEYS.keys()) - {"eval_strategy", "gen_batch_size"}
    assert len(known) > 25
    wrong = {
        name: (KEYS[name], ours[name])
        for name in known
        if not any(f"{key}.".startswith(f"{KEYS[name]}.") for key in ours[name])
    }
    assert not wrong
    rows = {**trl.table().rows, **verl.table().rows}
    copied = {
        key.rpartition(".")[2]: row.to for key, row in rows.items() if row.to and "val_" not in key
    }
    assert {name: KEYS[name] for name in KEYS.keys() & copied.keys()} == {
        name: copied[name] for name in KEYS.keys() & copied.keys()
    }
