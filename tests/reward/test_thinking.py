import pytest

from rollpacker.reward.base import after_thinking


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
        ("<think>a<think>b", ""),
        ("a <Thinking>b", "a "),
        ("<thought>a</thought>b", "b"),
        ("<reasoning>a</reasoning>b", "b"),
        ("<seed:think>a</seed:think>b", "b"),
        ("[THINK]a[/THINK]b", "b"),
        ("[THINK]cut off", ""),
        ("◁think▷a◁/think▷b", "b"),
        ("<|begin_of_thought|>a<|end_of_thought|>b", "b"),
        ("<|START_THINKING|>cut off", ""),
        ("<|inner_prefix|>a<|inner_suffix|>b", "b"),
        ("<|channel|>analysis<|message|>cut off", ""),
        ("<|channel|>analysis<|message|>a<|end|><|start|>x<|channel|>final<|message|>b", "b"),
    ],
)
def test_only_what_is_said_after_the_thinking_counts(text, said):
    assert after_thinking(text) == said
