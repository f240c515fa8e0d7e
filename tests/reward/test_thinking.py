import pytest

from rollpacker.reward.thinking import after_thinking


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("all of it", "all of it"),
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),
        ("<think>a</think>b</think>c", "c"),
        ("<think>cut off", ""),
        ("b <think>cut off", "b "),
        ("<think>a</think>b <think>c", "b "),
        ("<think>a <answer>b</answer>", "<answer>b</answer>"),
    ],
)
def test_only_what_is_said_after_the_thinking_counts(text, said):
    assert after_thinking(text) == said
