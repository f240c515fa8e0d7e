import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.core.types import PromptId
from rollpacker.data.base import DataError, Row
from rollpacker.data.split import hold_out


def rows(count: int, prompts: int = 10**6) -> list[Row]:
    return [
        Row(id=PromptId(f"r{i}"), prompt=f"p{i % prompts}", answer=1, domain="d", columns={})
        for i in range(count)
    ]


def ids(part: list[Row]) -> list[str]:
    return [row.id for row in part]


def test_other_sizes_and_orders_agree():
    training, held_out = hold_out(rows(400), 0.1, 0)
    assert 20 < len(held_out) < 60
    assert sorted(ids(training) + ids(held_out)) == sorted(ids(rows(400)))
    _, fewer = hold_out(rows(200), 0.1, 0)
    assert ids(fewer) == [name for name in ids(held_out) if int(name[1:]) < 200]
    _, backwards = hold_out(rows(400)[::-1], 0.1, 0)
    assert ids(backwards) == ids(held_out)[::-1]
    _, more = hold_out(rows(400), 0.2, 0)
    assert set(ids(held_out)) < set(ids(more))
    assert ids(hold_out(rows(400), 0.1, 1)[1]) != ids(held_out)


def test_the_split_of_today_is_that_of_tomorrow():
    """A change of it would put held-out problems into the training of resumed runs."""
    assert ids(hold_out(rows(40), 0.1, 0)[1]) == ["r19", "r30"]


@given(prompts=st.integers(2, 30), seed=st.integers(0, 9))
def test_rows_with_one_prompt_stay_together(prompts, seed):
    try:
        training, held_out = hold_out(rows(90, prompts), 0.5, seed)
    except DataError:
        return
    assert not {row.prompt for row in training} & {row.prompt for row in held_out}


def test_parts_without_rows():
    with pytest.raises(DataError, match=r"eval.fraction=0.001 holds out none of 3 rows: raise it"):
        hold_out(rows(3), 0.001, 0)
    with pytest.raises(DataError, match=r"eval.fraction=0.999 leaves none of 3 rows: lower it"):
        hold_out(rows(3), 0.999, 0)
