"""The reward for programs: find the program in a response and run it against the row's tests."""

from rollpacker.reward.code.reward import (
    CodeOptions,
    CodeReport,
    CodeReward,
    GraderHost,
    TestReport,
    read_options,
    row_tests,
)

__all__ = [
    "CodeOptions",
    "CodeReport",
    "CodeReward",
    "GraderHost",
    "TestReport",
    "read_options",
    "row_tests",
]
