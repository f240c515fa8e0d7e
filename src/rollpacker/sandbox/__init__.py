"""The code sandbox: the boundary between a hostile program and the trainer. It knows nothing of
rewards, prompts or training."""

from rollpacker.sandbox.formats import find_tests, float_tolerance, read_tests
from rollpacker.sandbox.grading.decode import shorten
from rollpacker.sandbox.remote import RemoteSandbox
from rollpacker.sandbox.sandbox import Sandbox, strongest_level
from rollpacker.sandbox.types import (
    LEVELS,
    AssertTest,
    CallTest,
    Level,
    Limits,
    Outcome,
    SandboxUnavailableError,
    StdinTest,
    StoppedError,
    Test,
    TestResult,
    Verdict,
    parse_test,
)

__all__ = [
    "LEVELS",
    "AssertTest",
    "CallTest",
    "Level",
    "Limits",
    "Outcome",
    "RemoteSandbox",
    "Sandbox",
    "SandboxUnavailableError",
    "StdinTest",
    "StoppedError",
    "Test",
    "TestResult",
    "Verdict",
    "find_tests",
    "float_tolerance",
    "parse_test",
    "read_tests",
    "shorten",
    "strongest_level",
]
