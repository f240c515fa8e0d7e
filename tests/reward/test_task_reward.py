import pytest
import reasoning_gym

from rollpacker.reward.base import GradingError
from rollpacker.reward.task import TaskReward, harmless, score_answer


def row(task: str, **options) -> dict:
    entry = reasoning_gym.create_dataset(task, size=1, seed=1, **options)[0]
    return entry | {"rg_task": task, "rg_options": options}


@pytest.fixture(scope="module")
def gcd() -> dict:
    return row("gcd", min_value=1, max_value=99)


def test_only_the_text_after_the_thinking_counts(gcd):
    answer = gcd["answer"]
    assert TaskReward()(f"so {answer}9 </think>\n{answer}\n", gcd) == 1.0
    assert TaskReward()(f"{answer}</think>wrong", gcd) == 0.0
    assert TaskReward()(answer, gcd) == 1.0


def test_a_truncated_response_scores_nothing_where_the_end_of_thinking_is_required(gcd):
    reward = TaskReward(require_think_end=True, format_pattern=r"\d+", format_bonus=0.1)
    assert reward(gcd["answer"], gcd) == 0.0
    assert reward(f"</think>{gcd['answer']}", gcd) == 1.1


def test_scores_agree_with_reasoning_gym(gcd):
    answer = gcd["answer"]
    dataset = reasoning_gym.create_dataset("gcd", size=1, seed=1, min_value=1, max_value=99)
    for text in (answer, f"it is {answer}", "nothing", f"{answer} {answer}"):
        assert TaskReward()(text, gcd) == dataset.score_answer(text, gcd)


def test_threshold(gcd):
    partial = f"it is {gcd['answer']}"
    assert 0 < TaskReward()(partial, gcd) < 0.99
    assert TaskReward(threshold=0.99)(partial, gcd) == 0.0
    assert TaskReward(threshold=0.99)(gcd["answer"], gcd) == 1.0


def test_answer_pattern_and_format_bonus():
    chain = row("chain_sum", min_terms=2, max_terms=3, min_digits=1, max_digits=1)
    reward = TaskReward(
        answer_pattern=r"Answer: (-?\d+)",
        threshold=0.99,
        format_pattern=r"Answer: -?\d+",
        format_bonus=0.1,
    )
    right = chain["answer"]
    assert reward(f"4 - 1 = 3. Answer: {right}", chain) == 1.1
    assert reward(f"Answer: 1000, no. Answer: {right} \n", chain) == 1.1
    assert reward(f"Answer: {right} and more", chain) == 1.0
    assert reward("Answer: 1000", chain) == 0.1
    assert reward(right, chain) == 0.0


def test_bad_patterns_and_foreign_rows():
    with pytest.raises(ValueError, match="option 'answer_pattern' is not a regular expression"):
        TaskReward(answer_pattern="(")
    with pytest.raises(GradingError, match="needs rows of an 'rg:<task>' dataset"):
        TaskReward()("5", {"answer": "5"})


EVALUATED = ["string_insertion", "spiral_matrix", "binary_matrix", "n_queens"]
PARSED = [
    "countdown",
    "intermediate_integration",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
]


@pytest.mark.parametrize("task", EVALUATED + PARSED)
@pytest.mark.parametrize(
    "text",
    [
        "__import__('pathlib').Path('{}').touch()",
        "[__import__('pathlib').Path('{}').touch()]",
        "open('{}', 'w')",
        "(lambda: open('{}', 'w'))()",
        "[open('{}', 'w') for _ in (1,)]",
    ],
)
def test_scorers_that_evaluate_get_no_programs(task, text, tmp_path):
    target = tmp_path / "run"
    problem = row(task)
    assert score_answer(text.replace("{}", str(target)), problem) == 0.0
    assert not target.exists()


@pytest.mark.parametrize("task", EVALUATED + PARSED)
def test_honest_answers_still_reach_those_scorers(task):
    problem = row(task)
    answer = problem["answer"] or str(problem["metadata"].get("solution", ""))
    if task == "n_queens":
        answer = problem["metadata"]["valid_answers"][0]
    if task == "puzzle24":
        assert harmless(task, "(3 + 5) * 3")
        return
    assert score_answer(answer, problem) == 1.0


def test_literals_and_algebra_are_harmless():
    assert harmless("spiral_matrix", "[1, 2, -3]")
    assert harmless("spiral_matrix", "1 2 3")
    assert not harmless("spiral_matrix", "[9**9**9]")
    assert harmless("simple_integration", "x**2/2 + sin(x)*exp(2*x) + C")
    assert not harmless("simple_integration", "exec(input())")
    assert not harmless("simple_integration", "x.func")
