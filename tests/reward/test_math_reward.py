import json
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from case_files import read_table
from rollpacker.reward.base import GradingError
from rollpacker.reward.math import MathReward
from rollpacker.reward.math.extract import BOLD, BOX, LAST, MARK, SENTENCE, TAG, Extracted, extract

UNREAD = {"m053"}
"""A condition that two texts say in different words."""


def cases(name):
    lines = (Path(__file__).parent / f"cases/{name}.jsonl").read_text("utf-8").splitlines()
    return [case for case in map(json.loads, lines) if case.get("id") not in UNREAD]


SLOW = r"\boxed{(a+b+c+d+e+f)^{60}}"
RIGHT = read_table(__file__, "RIGHT")
DEGENERATE = (r"\boxed{" * 500, "(" * 3000, "\\boxed{" + "{" * 3000 + "5")
WRONG = [*read_table(__file__, "WRONG"), *(("5", text) for text in DEGENERATE)]
HOSTILE = [
    "__import__('os').system('touch {}')",
    r"\boxed{__import__('os').system('touch {}')}",
    r"$__import__('pathlib').Path('{}').touch()$",
    r"\boxed{open('{}','w')}",
    "1+(lambda: open('{}', 'w'))()",
]


@pytest.fixture(scope="module")
def score():
    reward = MathReward()
    return lambda gold, text: reward(text, {"answer": gold})


@pytest.mark.parametrize(
    ("gold", "text", "worth"), [*((*row, 1.0) for row in RIGHT), *((*row, 0.0) for row in WRONG)]
)
def test_answers(score, gold, text, worth):
    assert score(gold, text) == worth


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_in_a_response_is_run(score, text, tmp_path):
    target = tmp_path / "run"
    assert score("5", text.replace("{}", str(target), 1)) == 0.0
    assert not target.exists()


def test_an_answer_that_takes_too_long_is_wrong_and_leaves_no_timer():
    reward = MathReward(time_limit=0.3)
    start = time.process_time()
    assert reward(SLOW, {"answer": "(x+y)^{50}"}) == 0.0
    assert time.process_time() - start < 3
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert reward(r"\boxed{5}", {"answer": "5"}) == 1.0


@pytest.mark.parametrize("relation", ["\\approx", "=", "<"])
def test_numerals_beyond_any_float_are_compared(relation):
    big, other = "9" * 400, "8" + "9" * 399
    text = rf"\boxed{{{big} {relation} {big}}}"
    right = MathReward().explain(text, {"answer": big})
    assert right.score == (0.0 if relation == "<" else 1.0), right
    assert MathReward().explain(text, {"answer": other}).score == 0.0
    assert MathReward().explain(rf"\boxed{{{big}.5}}", {"answer": f"{big}.5"}).score == 1.0


def test_boxes_can_be_required():
    assert MathReward(require_boxed=True)("It is 5", {"answer": "5"}) == 0.0
    assert MathReward()("It is 5", {"answer": "5"}) == 1.0


def test_numbers_as_answers_and_rows_without():
    assert MathReward()(r"\boxed{5}", {"answer": 5}) == 1.0
    for row in ({"question": "?"}, {"answer": None}, {"answer": float("nan")}, {"answer": ""}):
        with pytest.raises(GradingError, match="needs rows with an 'answer'"):
            MathReward()("5", row)


def test_the_last_complete_box_counts():
    assert extract(r"\boxed{1} then \boxed{\frac{1}{2}}.") == Extracted(r"\frac{1}{2}", BOX)
    assert extract(r"\boxed{1} then \boxed{2") == Extracted("1", BOX)
    assert extract(r"\boxed{5} \fbox{6}") == Extracted("5", BOX)


@pytest.mark.parametrize("name", ["math", "math_more", "math_kinds"])
def test_what_people_bring_and_what_a_policy_may_try(score, name):
    missed = [
        case for case in cases(name) if score(case["answer"], case["response"]) != case["score"]
    ]
    assert missed == []


@pytest.mark.parametrize(
    ("text", "answer", "rule"),
    [
        (r"So \boxed{3}. The answer is 4. #### 5", "3", BOX),
        ("#### 5\nThe answer is 4.", "5", MARK),
        ("The answer is 4. It took 5 steps.", "4", SENTENCE),
        ("There are **4** of them, of 5.", "4", BOLD),
        ("Of 5 there are 4.", "4", LAST),
        (r"<answer>4</answer> and not \boxed{5}", "4", TAG),
        (r"<answer>so \boxed{4}</answer>", "4", BOX),
        ("#### Step 2\nAnswer: 4", "4", SENTENCE),
    ],
)
def test_the_strongest_rule_finds_the_answer(text, answer, rule):
    assert extract(text) == Extracted(answer, rule)


def test_what_a_report_says():
    report = MathReward().explain(r"\boxed{72 clips}", {"answer": "72 dollars"})
    assert report.found == Extracted("72 clips", BOX)
    assert (str(report.answer), str(report.golds[0])) == ("72; unit clip", "72; unit $")
    assert (report.score, report.why) == (0.0, "units differ: $ and clip")


@pytest.mark.parametrize(
    ("answer", "message"),
    [([], "an empty list"), ({"x": 1}, "a mapping with x, expected one of value, answer")],
)
def test_answers_of_a_wrong_form_are_named(answer, message):
    with pytest.raises(GradingError, match=message):
        MathReward()("5", {"answer": answer})


def test_a_long_comparison_gives_signs_of_life_and_ends_when_unwanted():
    asked = []
    reward, row = MathReward(time_limit=0.8), {"answer": "(x+y)^{50}"}
    assert reward(SLOW, row, lambda: bool(asked.append(1))) == 0.0
    assert len(asked) >= 2
    assert MathReward(time_limit=600)(SLOW, row, lambda: True) == 0.0


@pytest.mark.parametrize(
    "text", ["7^{10^8}", "9^{9^{9^9}}", "9999999999!", "(x+1)^{1000}", r"\prod_{k=1}^{10000000} k"]
)
def test_what_is_too_large_is_compared_as_text(score, text):
    start = time.process_time()
    assert score("5", f"\\boxed{{{text}}}") == 0.0
    assert score(text, f"\\boxed{{{text}}}") == 1.0
    assert time.process_time() - start < 1


@given(text=st.text(alphabet="\\boxed{}$#*<answer>/ 0123.,=-(%√½一无个\n", max_size=60))
def test_any_text_has_a_score(text):
    report = MathReward().explain(text, {"answer": "5"})
    assert report.score in (0.0, 1.0)
    assert MathReward()(text, {"answer": f"5{text}"}) in (0.0, 1.0)


@pytest.mark.parametrize(
    "piece", ["$", "**", r"\boxed{", "answer is ", "1,", "#### ", "{", "一", "\\ "]
)
def test_long_texts_cost_little(piece):
    start = time.process_time()
    MathReward()(piece * (100_000 // len(piece)), {"answer": "5"})
    assert time.process_time() - start < 5.5
