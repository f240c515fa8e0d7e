"""All hostile programs, with the tests that they must not pass."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from rollpacker.sandbox.hostile.bombs import BOMBS
from rollpacker.sandbox.hostile.forging import FORGED_ASSERTS, FORGED_CALLS, FORGED_OUTPUT
from rollpacker.sandbox.hostile.grading import BLAMING, COSTLY
from rollpacker.sandbox.hostile.network import NETWORK
from rollpacker.sandbox.hostile.processes import PROCESSES
from rollpacker.sandbox.hostile.reading import PLANT, PRELUDE, READING
from rollpacker.sandbox.hostile.world import Targets
from rollpacker.sandbox.hostile.writing import WRITING
from rollpacker.sandbox.types import AssertTest, CallTest, StdinTest, Test, Verdict

ESCAPED = "ESCAPED"
_WRONG = frozenset({"fail", "crash", "tle_cpu", "tle_idle"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostile:
    """A hostile program.

    Args:
        name: unique.
        kind: ``escape``, ``bomb``, ``forge``, ``blame`` or ``cost``.
        program: its source.
        test: passed only by a program that got through.
        verdicts: those that say it was contained.
        before: a program that runs before it in the same sandbox.
    """

    name: str
    kind: str
    program: str
    test: Test
    verdicts: frozenset[str] = _WRONG
    before: str | None = None

    def contained(self, verdict: Verdict) -> bool:
        """Whether a verdict says that it was."""
        return verdict.verdict in self.verdicts


def hostile_programs(world: Targets) -> list[Hostile]:
    """All of them, aimed at a world."""
    return [*_escapes(world), *_forgers(world), *_bombs(), *_at_the_grader()]


def _escapes(world: Targets) -> Iterator[Hostile]:
    test = StdinTest(stdin=json.dumps(world.fields) + "\n", stdout=ESCAPED)
    for name, source in (READING | WRITING | NETWORK | PROCESSES).items():
        before = PLANT if name == "earlier_program" else None
        program = PRELUDE + source
        yield Hostile(name=name, kind="escape", program=program, test=test, before=before)


def _forgers(world: Targets) -> Iterator[Hostile]:
    answer = f"expected-{secrets.token_hex(16)}"
    call = CallTest(call="f", args=[world.fields], expected=answer)
    asserts = AssertTest(asserts=f"assert f(None) == {answer!r}")
    output = StdinTest(stdin="1\n", stdout=answer)
    for test, programs in (
        (call, FORGED_CALLS),
        (asserts, FORGED_ASSERTS),
        (output, FORGED_OUTPUT),
    ):
        for name, program in programs.items():
            yield Hostile(name=name, kind="forge", program=program, test=test)


def _bombs() -> Iterator[Hostile]:
    test = StdinTest(stdin="", stdout=ESCAPED)
    for name, (program, verdicts) in BOMBS.items():
        yield Hostile(
            name=name, kind="bomb", program=program, test=test, verdicts=frozenset(verdicts)
        )


def _at_the_grader() -> Iterator[Hostile]:
    test = CallTest(call="f", args=[3], expected=secrets.token_hex(16))
    for name, program in BLAMING.items():
        yield Hostile(name=name, kind="blame", program=program, test=test)
    for name, (program, test) in COSTLY.items():
        yield Hostile(name=name, kind="cost", program=program, test=test)
