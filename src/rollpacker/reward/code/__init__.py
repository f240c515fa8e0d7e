"""The reward for programs: find the program in a response, run it against the row's tests.

It knows the sandbox, and nothing of grading processes but the ``GraderHost`` that it tells things.
"""

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
