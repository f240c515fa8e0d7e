"""The judge's queue, batches and failures, with a function in place of a model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judge_models import request

from case_files import read_table
from rollpacker.policy.grading import JudgeBudget, JudgeModel, JudgePlan
from rollpacker.reward.base import GradingError
from rollpacker.reward.judge.judge import Judge
from rollpacker.reward.judge.options import (
    BUILT_IN,
    JudgeOptions,
    capped,
    load_template,
    make_parser,
    prompt_text,
)

OPTIONS = {"mode": "generate", "template": "{completion}", "parser": "regex:(\\d+)$"}


class Answers:
    """Repeats each prompt; no more than ``room`` at once, as a device without more memory."""

    def __init__(self, room: int = 99) -> None:
        self.room = room
        self.batches: list[list[str]] = []

    def __call__(self, prompts):
        self.batches.append(list(prompts))
        if len(prompts) > self.room:
            raise MemoryError("too many")
        return prompts


def judge_of(answers: Answers, **options) -> Judge:
    return Judge(JudgeOptions(**OPTIONS | options), generate=answers)


def test_scores_come_in_the_order_of_the_requests():
    answers = Answers()
    scores = judge_of(answers).grade([request(1, "long 7"), request(2, "3"), request(3, "ab 5")])
    assert scores == [0.7, 0.3, 0.5]
    assert answers.batches == [["3", "ab 5", "long 7"]]


def test_batches_are_of_similar_lengths_and_capped():
    answers = Answers()
    texts = ["x" * n + " 1" for n in (50, 1, 1, 48, 1, 2)]
    judge_of(answers, max_concurrency=3).grade([request(i, t) for i, t in enumerate(texts)])
    assert [[len(p) - 2 for p in b] for b in answers.batches] == [[1, 1, 1], [2, 48, 50]]
    answers.batches.clear()
    judge_of(answers, batch_tokens=100).grade([request(i, t) for i, t in enumerate(texts)])
    assert [[len(p) - 2 for p in b] for b in answers.batches] == [[1, 1, 1, 2], [48], [50]]


@given(st.integers(1, 9), st.integers(1, 20))
def test_out_of_memory_halves_the_batch(room, count):
    answers = Answers(room)
    scores = judge_of(answers).grade([request(i, str(i % 10)) for i in range(count)])
    assert scores == [(i % 10) / 10 for i in range(count)]


def test_one_that_does_not_fit_alone_has_no_score():
    judge = judge_of(Answers(room=0))
    outcomes = judge.outcomes([request(1, "1"), request(2, "2")])
    assert all(isinstance(o, GradingError) and "out of memory" in str(o) for o in outcomes)


def test_what_cannot_be_parsed_is_an_error_of_its_own():
    judge = judge_of(Answers())
    good, bad = judge.outcomes([request(1, "4"), request(2, "four")])
    assert good == 0.4
    assert isinstance(bad, GradingError)
    with pytest.raises(GradingError, match="holds no grade"):
        judge.grade([request(1, "4"), request(2, "four")])


def test_an_answer_too_few_is_an_error():
    judge = Judge(JudgeOptions(**OPTIONS), generate=lambda prompts: prompts[1:])
    with pytest.raises(GradingError, match="0 answers to 1 prompts"):
        judge.grade([request(1, "4")])


def test_a_row_without_a_reference_is_an_error_of_its_own():
    judge = judge_of(Answers(), template="{reference}|{completion}")
    good, bad = judge.outcomes([request(1, "4"), request(2, "4", answer=None)])
    assert good == 0.4
    assert "uses {reference}" in str(bad)


def test_overlong_prompts_fail_or_lose_their_beginning():
    answers = Answers()
    text = "abcdefgh" * 20 + " 7"
    with pytest.raises(GradingError, match="tokens too long"):
        judge_of(answers, max_tokens=50).grade([request(1, text)])
    assert judge_of(answers, max_tokens=50, overlong="tail").grade([request(1, text)]) == [0.7]
    (prompt,) = answers.batches[-1]
    assert 30 <= len(prompt) <= 50
    assert prompt.startswith("[...] ")
    assert text.endswith(prompt.removeprefix("[...] "))
    with pytest.raises(GradingError, match=r"no room|too long"):
        judge_of(answers, max_tokens=5, overlong="tail", template="long text: {completion}").grade(
            [request(1, text)]
        )


def test_only_what_follows_the_mark_is_judged():
    answers = Answers()
    judge_of(answers, after="</think>").grade([request(1, "so </think> 3"), request(2, "4")])
    assert answers.batches == [["3", "4"]]


@pytest.mark.parametrize(
    ("options", "problem"), read_table(__file__, "test_unusable_options_are_refused")
)
def test_unusable_options_are_refused(options, problem):
    with pytest.raises(ValueError, match=problem):
        judge_of(Answers(), **options)


def test_a_judge_without_a_model_is_refused():
    with pytest.raises(ValueError, match=r"options\.model is missing"):
        Judge(JudgeOptions())


MODEL = JudgeModel(
    layers=8,
    layer_bytes=100,
    fixed_bytes=50,
    token_bytes=1.0,
    token_seconds=0.001,
    copy_seconds=0.1,
)


def test_the_policy_decides_within_the_batch_cap():
    budget = JudgeBudget(MODEL, most=9)
    plan = capped(lambda lengths: budget.decide(lengths, 1e6), 10**6)
    assert plan([10] * 20) == budget.decide([10] * 20, 1e6)
    decided = capped(lambda lengths: budget.decide(lengths, 1e6), 30)([10] * 20)
    assert decided is not None
    assert decided.concurrency <= 3
    assert plan([]) is None
    assert capped(lambda lengths: budget.decide(lengths, 10.0), 30)([10]) is None


def test_a_batch_has_at_least_one():
    fixed = JudgePlan(concurrency=4, resident=3)
    plan = capped(lambda _: fixed, 10)([99, 100])
    assert plan == JudgePlan(concurrency=1, resident=3)


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
    ("text", "problem"), read_table(__file__, "test_unusable_templates_are_refused")
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
