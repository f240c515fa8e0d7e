"""When a reward function counts as broken."""

from rollpacker.policy.grading import IN_A_ROW, RESPONSES, RewardFaults


def first_broken(faults: RewardFaults, calls: list[tuple[int, str, str]]) -> int | None:
    """Which of the failed calls, from 1, tells that function 0 is broken."""
    for number, (response, prompt, way) in enumerate(calls, 1):
        if faults.failed(0, response, prompt, way):
            return number
    return None


def test_three_prompts_that_fail_alike() -> None:
    calls = [(i, f"p{i}", "late") for i in range(5)]
    faults = RewardFaults(1)
    assert first_broken(faults, calls) == 3
    assert faults.counts(0) == (3, 3)
    assert faults.suspects() == [0]
    assert faults.tried(0, "p1")
    assert not faults.tried(0, "p4")


def test_repeated_calls_for_one_response_count_once() -> None:
    calls = [(i // 4, f"p{i // 4}", "late") for i in range(40)]
    assert first_broken(RewardFaults(1), calls) == 9


def test_one_bad_prompt_is_no_broken_function_but_eight_responses_are() -> None:
    assert first_broken(RewardFaults(1), [(i, "p", "late") for i in range(7)]) is None
    assert first_broken(RewardFaults(1), [(i, "p", "late") for i in range(20)]) == RESPONSES


def test_faults_of_other_kinds_are_counted_apart() -> None:
    kinds = [(i, f"p{i}", "abcd"[i % 4]) for i in range(20)]
    faults = RewardFaults(1)
    assert first_broken(faults, kinds) == RESPONSES
    assert faults.counts(0) == (2, 8)


def test_an_answer_clears_it_and_asks_for_much_more() -> None:
    faults = RewardFaults(2)
    for turn in range(50):
        assert (
            first_broken(faults, [(2 * turn + i, f"p{turn}{i}", "late") for i in range(2)]) is None
        )
        faults.answered(0)
        assert not faults.suspects()
    calls = [(1000 + i, f"p{i}", "late") for i in range(100)]
    assert first_broken(faults, calls) == IN_A_ROW
    assert not faults.failed(1, 1, "p", "late")


def test_who_fails_for_the_machines_faults_is_given_time() -> None:
    calls = [(i, f"p{i}", "no core was free") for i in range(100)]
    assert first_broken(RewardFaults(1, patient=[0]), calls) == IN_A_ROW
