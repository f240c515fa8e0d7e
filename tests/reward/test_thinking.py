import pytest

from case_files import read_table
from rollpacker.reward.base import after_thinking


@pytest.mark.parametrize(
    ("text", "said"), read_table(__file__, "test_only_what_is_said_after_the_thinking_counts")
)
def test_only_what_is_said_after_the_thinking_counts(text, said):
    assert after_thinking(text) == said
