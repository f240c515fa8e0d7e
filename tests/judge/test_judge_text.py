import pytest
from hypothesis import given
from hypothesis import strategies as st

from case_files import read_table
from rollpacker.reward.base import GradingError
from rollpacker.reward.judge.options import BUILT_IN, load_template, make_parser, prompt_text

VALUES = {"prompt": "1+1?", "completion": "It is {2}.", "reference": "2"}


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_templates_hold_what_they_are_given(name):
    template = load_template(name)
    text = template.render(VALUES)
    assert all(VALUES[field] in text for field in template.fields)
    assert "{2}" in text


def test_a_template_is_a_text_or_a_file(tmp_path):
    file = tmp_path / "judge.txt"
    file.write_text("{{json}} {completion} of {reference}")
    for name in (str(file), file.read_text()):
        assert load_template(name).render(VALUES) == "{json} It is {2}. of 2"


@pytest.mark.parametrize(
    ("text", "problem"),
    read_table(__file__, "test_unusable_templates_are_refused"),
)
def test_unusable_templates_are_refused(text, problem):
    with pytest.raises(ValueError, match=problem):
        load_template(text)


def test_a_missing_reference_is_no_empty_reference():
    with pytest.raises(GradingError, match=r"uses \{reference\}"):
        load_template("reference").render(VALUES | {"reference": None})
    load_template("no_reference").render(VALUES | {"reference": None})


def test_chats_become_text():
    assert prompt_text([{"role": "user", "content": "hi"}]) == "hi"
    turns = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    assert prompt_text(turns) == "system: be\nuser: hi"


GRADES = read_table(__file__, "GRADES")


@pytest.mark.parametrize(("parser", "text", "score"), GRADES)
def test_parsers(parser, text, score):
    assert make_parser(parser)(text) == score


@pytest.mark.parametrize("name", ["stars", "json:", "regex:(", "regex:no group", "regex:(a)(b)"])
def test_unusable_parsers_are_refused(name):
    with pytest.raises(ValueError, match="judge: "):
        make_parser(name)


@given(
    st.sampled_from(["yes_no", "brackets", "json:score", "regex:(.+)"]),
    st.text(alphabet='yesnoYESNO[]{}":,.- 0123456789score\n', max_size=60),
)
def test_any_text_gives_a_score_in_range_or_none(parser, text):
    score = make_parser(parser, -3.0, 5.0)(text)
    assert score is None or 0.0 <= score <= 1.0
