"""Which part of a response is its program."""

import pytest

from rollpacker.reward.code.blocks import find_program


def code_of(response: str, *names: str) -> str | None:
    program = find_program(response, names)
    return None if program is None else program.code


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("", None),
        ("print(1)", None),
        ("```python\nprint(1)", None),
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("```py\r\nprint(1)\r\n```\r\n", "print(1)\n"),
        ("```Python3 \n\n  x = 1\n```", "\n  x = 1\n"),
        ("```cpp\nint x;\n```", None),
        ("```python\na\n```\nout:\n```text\n1\n```", "a\n"),
        ("```python\na\n```\nbetter:\n```python\nb\n```", "b\n"),
        ("```python\na\n```\ncut:\n```python\nb", "a\n"),
        ("````python\ns = '''\n```\nx\n```\n'''\n````", "s = '''\n```\nx\n```\n'''\n"),
        ("```python\nthought\n```</think>", None),
        ("```python\nold\n```</think>now\n```python\nnew\n```", "new\n"),
        ("```python\na\n```\n<think>or\n```python\nb\n```\nhmm, that is", "a\n"),
        ("<think>or\n```python\nb\n```\nhmm, that is", None),
        ("```python\n```", "\n"),
        ('```python title="a.py"\na\n```\n```text\nb\n```', "a\n"),
        ("```python\ns = '\u2028\x0c'\n```", "s = '\u2028\x0c'\n"),
        ("so: ```python\nprint(1)\n```", "print(1)\n"),
    ],
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


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("Code: ```python\na\n```", "a\n"),
        ("Code: ```\na\n```", "a\n"),
        ("end it with ```\na\n```\n", None),
        ("Use `x`: ```py\na\n```", "a\n"),
        ("between ``` and ```python\na\n```\n", None),
        ("```python\na```", "a\n"),
        ("```python\na\n```.", "a\n"),
        ("```python\nprint('```')\n```", "print('```')\n"),
        ("~~~python\na\n```\n~~~", "a\n```\n"),
        ("```python\na\n`````\nend", "a\n"),
        ("```python\na\n  ````  \n```", "a\n"),
        ("```python\na\n````text\nb\n```", "a\n````text\nb\n"),
        ("1. x\n\n   ```python\n   if a:\n       b\n   ```", "if a:\n    b\n"),
        ("- ```python\n  a\n\n  b\n  ```", "a\n\nb\n"),
        ("- ```python\nif a:\n  b\n```", "if a:\n  b\n"),
        ("  ```python\n    a\n  ```", "  a\n"),
        ("\t```python\n\ta\n\t```", "a\n"),
        ("> ```python\n> a\n>  b\n> ```", "a\n b\n"),
        ("```{.python .numberLines}\na\n```", "a\n"),
        ("``` python\na\n```", "a\n"),
        ("```python-repl\na\n```", None),
        ("```ipython\na\n```", None),
        ("````md\n```python\na\n```\n````\n", "a\n"),
        ("````\n```python\na\n```\n````\n", "a\n"),
        ("```python\na\n```output\n3\n```", "a\n"),
        ("```python\n```python\na\n```", "a\n"),
        ('```python\n"""\n```\nx\n```\n"""\na\n```', '"""\n```\nx\n```\n"""\na\n'),
        ("```python\n# '''\n```\nend", "# '''\n"),
        ("```python\n# ```\n# 1\n# ```\na\n```", "# ```\n# 1\n# ```\na\n"),
        ('```python\nx = \'"""\'\n```\n```text\n""" y\n```', 'x = \'"""\'\n'),
        ("```python\nx = '\\'\"\"\"'\n```\n```text\n```", "x = '\\'\"\"\"'\n"),
        ('```python\nx = """it\'s\n```\n"""\na\n```', 'x = """it\'s\n```\n"""\na\n'),
        ("```\nx = 1\n```\n```\n1\n```", "x = 1\n"),
        ("```\n1\n```\n```\n2\n```", "2\n"),
        ("```\nPython\na\n```\n```\nx = 1\n```", "a\n"),
        ("```python\na\n```\n```python\n# only words\n```", "a\n"),
        ("<answer>```python\na\n```</answer>", "a\n"),
        ("<answer>```python\na</answer>", "a\n"),
        ("<answer>\nx = 1\n</answer>", "x = 1\n"),
        ("<answer>\n  x = 1\n</answer>", "  x = 1\n"),
        ("<answer>text</answer>", None),
        ("<answer>a, b[i, 0] = c</answer>", "a, b[i, 0] = c\n"),
        ("```python\na\n```\n<answer>The output for it = 3</answer>", "a\n"),
        ("<answer>```python\na\n```</answer><answer>```python\nb\n```</answer>", "b\n"),
        ("```python\na\n```<answer>above</answer>", "a\n"),
        ("```python\na\n```\n<answer>```python\nb\n```", "b\n"),
        ("</answer>```python\na\n```", "a\n"),
    ],
)
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
NO_USE = "the last block that is no use of another marked as Python"


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
    ("last", "counts"),
    [
        ("print(f(1))", False),
        ("assert f(1) == 1", False),
        ("def test_f():\n    assert f(1) == 1", False),
        ("x = f(1)\nprint(x)", False),
        ("print(4)", True),
        ("def f(x): return x\nprint(f(1))", True),
        ("f = lambda x: x\nprint(f(1))", True),
        ("from math import e, f\nprint(f(1))", True),
        ("from m import e, f\nprint(f(1))", False),
        ("from main import f\ndef test_f():\n    assert f(1) == 1", False),
        ("Input: 1 2\nOutput: 3", False),
        ("Sample Input 1\n1 2", False),
        ("$ python main.py", False),
        (">>> f(1)\n1", False),
        ("if input(): print(1)\nelse: print(2)", True),
        ("def g(f, x):\n    return f(x)", True),
        ("print(self.f(1), ff(1))", True),
        ("for f in [int]:\n    f(1)", True),
        ("print(sum([1]))", True),
    ],
)
def test_a_use_of_an_earlier_block_is_not_the_program(last: str, counts: bool) -> None:
    first = "def f(x):\n    return x\ndef sum(x):\n    return x\nprint(f(int(input())))\n"
    found = code_of(f"```python\n{first}```\nSo:\n```python\n{last}\n```\n")
    assert found == (f"{last}\n" if counts else first)
