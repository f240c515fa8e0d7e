"""Which part of a response is its program."""

import pytest

from case_files import read_table
from rollpacker.reward.code.blocks import find_program


def code_of(response: str, *names: str) -> str | None:
    program = find_program(response, names)
    return None if program is None else program.code


@pytest.mark.parametrize(
    ("completion", "program"), read_table(__file__, "test_the_last_program_is_found")
)
def test_the_last_program_is_found(completion: str, program: str | None) -> None:
    assert code_of(completion) == program


def test_finding_a_program_takes_linear_time() -> None:
    assert code_of("```python\n" * 8_000 + "`" * 100_000) == "\n"
    assert code_of("```" + " " * 500_000 + "`\n" + "```" + " " * 500_000) is None

    assert code_of("```x" * 8_000 + "`") is None
    assert code_of("~~~x" * 8_000 + "`") is None
    assert code_of("`" * 100_000 + "x`") is None
    assert code_of("```python\n'''\n```\n\"\"\"\n" * 4_000) is not None
    assert code_of("<answer>" * 8_000 + "</answer>") is None
    assert (
        code_of("```python\n" + "'\\\\'" * 100_000 + "\n" + '\\\\"' * 100_000 + "\n```") is not None
    )
    assert code_of("<answer>" + ("a, " * 100 + "\n") * 2_000 + "a[" * 100_000 + "</answer>") is None
    uses = "```python\nf(1)\n```\n" * 8_000
    assert code_of("```python\ndef f(x): ...\n```\n" + uses, "f", "g") == "def f(x): ...\n"
    assert code_of("```\n" + "for in" * 4_000 + "\n" * 200_000 + "```") is not None


@pytest.mark.parametrize(("response", "program"), read_table(__file__, "test_layouts"))
def test_layouts(response: str, program: str | None) -> None:
    assert code_of(response) == program


READS = "n = input()\nprint(n)\n"


@pytest.mark.parametrize(
    ("first", "last", "counts"),
    [
        (READS, READS + "print(2)\n", True),
        (READS, "import sys\nsys.stdout.write(sys.stdin.read())\n", True),
        (READS, "n = input()\n", False),
        (READS, "n = input()\n...\nprint(n)\n", False),
        (READS, "1 2\n", False),
        ("def f(x):\n    return x\n", "def f(x):\n    return 2 * x\n", True),
        ("def f(x):\n    return x\n", "f(1) = 1\n", False),
        ("def f(x):\n    return g(x)\ndef g(x): ...\n", "def f(x):\n    return g(x)\n", False),
        ("print(1)\n", "x = 1\n", False),
    ],
)
def test_a_later_block_without_a_language_that_is_a_program_too_is_meant(
    first: str, last: str, counts: bool
) -> None:
    found = code_of(f"```python\n{first}```\nFinal answer:\n```\n{last}```\n")
    assert found == (last if counts else first)


DEFINES = "```python\nclass Solution:\n    def add(self): ...\n```\n"
USES = "```python\nprint(add(1, 2))\n```\n"
NO_USE = "the last block that does not only use another marked as Python"


@pytest.mark.parametrize(
    ("response", "names", "rule"),
    [
        (DEFINES, ["add"], "the only block marked as Python"),
        (DEFINES + USES, [], NO_USE),
        (DEFINES + USES, ["add"], "the last block that defines what the tests use marked as "),
        (DEFINES + USES, ["sub"], NO_USE),
        (DEFINES + USES + USES, [], NO_USE),
        (USES + DEFINES, ["add"], "the last block marked as Python"),
        ("```\nadd = lambda: 1\n```\n```\nadd()\n```", ["add"], "the last block that defines what"),
        (f"<answer>{DEFINES}</answer>", [], "the only block marked as Python in <answer>"),
        ("<answer>x = 1</answer>", [], "the only block marked as Python in <answer>"),
    ],
)
def test_the_rule_is_named(response: str, names: list[str], rule: str) -> None:
    found = find_program(response, names)
    assert found is not None
    assert found.rule.startswith(rule)
    assert ("add()" in found.code) is False


@pytest.mark.parametrize(
    ("last", "counts"), read_table(__file__, "test_a_use_of_an_earlier_block_is_not_the_program")
)
def test_a_use_of_an_earlier_block_is_not_the_program(last: str, counts: bool) -> None:
    first = "def f(x):\n    return x\ndef sum(x):\n    return x\nprint(f(int(input())))\n"
    found = code_of(f"```python\n{first}```\nSo:\n```python\n{last}\n```\n")
    assert found == (f"{last}\n" if counts else first)
