"""A real model as a judge: SmolLM2-135M-Instruct tells right sums from wrong ones."""

import os
import random
import time
from pathlib import Path

import pytest
from judge_models import request

from rollpacker.reward.judge.judge import Judge
from rollpacker.reward.judge.options import JudgeOptions

COUNT = 100
FOLDER = Path(
    os.environ.get("ROLLPACKER_SMOLLM2", "~/.cache/rollpacker/smollm2-135m-instruct")
).expanduser()


def sums(count: int, seed: int):
    """(question, response, reference, whether it is right), half of them right."""
    rng = random.Random(seed)
    for number in range(count):
        terms = [rng.randint(1, 9) for _ in range(rng.choice((2, 3)))]
        text, total, steps = str(terms[0]), terms[0], []
        for term in terms[1:]:
            sign = rng.choice((1, -1))
            step = f"{total} {'+' if sign > 0 else '-'} {term}"
            text += step.removeprefix(str(total))
            total += sign * term
            steps.append(f"{step} = {total}")
        right = number % 2 == 0
        said = total if right else total + rng.choice((-3, -2, -1, 1, 2, 3, 10))
        steps[-1] = steps[-1].rpartition(" ")[0] + f" {said}"
        yield f"{text} =", f"{', '.join(steps)}. Answer: {said}", str(total), right


def area_under_curve(scores, labels):
    rights = [s for s, right in zip(scores, labels, strict=True) if right]
    wrongs = [s for s, right in zip(scores, labels, strict=True) if not right]
    better = sum((r > w) + 0.5 * (r == w) for r in rights for w in wrongs)
    return better / (len(rights) * len(wrongs))


def test_the_sums_are_sums():
    for question, response, reference, right in sums(40, seed=2):
        assert eval(question.rstrip("= ")) == int(reference)
        assert (response.rpartition("Answer: ")[2] == reference) == right
    assert area_under_curve([0.1, 0.4, 0.35, 0.8], [False, False, True, True]) == 0.75


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.is_dir(), reason="no SmolLM2: python examples/smollm2/prepare.py")
def test_smollm2_tells_right_from_wrong():
    rows = list(sums(COUNT, seed=1))
    judge = Judge(
        JudgeOptions(
            model=str(FOLDER), template="few_shot", after="Answer:", dtype="bfloat16", resident=4
        )
    )
    requests = [
        request(number, response, question, answer=reference)
        for number, (question, response, reference, _) in enumerate(rows)
    ]
    start = time.process_time()
    scores = judge.grade(requests)
    seconds = time.process_time() - start
    labels = [right for *_, right in rows]
    area = area_under_curve(scores, labels)
    median = sorted(scores)[COUNT // 2]
    agree = sum((s >= median) == right for s, right in zip(scores, labels, strict=True)) / COUNT
    print(f"AUC {area:.3f}, {agree:.0%} right at the median, {seconds:.0f} CPU s")
    assert area >= 0.65
