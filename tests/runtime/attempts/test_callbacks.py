"""Whatever a callback of the driver raises ends the run, in one line and soon; nothing hangs."""

from __future__ import annotations

import ast
import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from runtime_jobs import Workshop, run, write_byte_model

import rollpacker
from rollpacker.runtime.messages.faults import Breaker, spawn

_SOON_S = 10.0
_SOURCE = Path(rollpacker.__file__).parent


class Loop(asyncio.SelectorEventLoop):
    """Notes by name each callback of ours that it calls; the ``victim`` raises instead."""

    def __init__(self, victim: str) -> None:
        super().__init__()
        self.victim = victim
        self.seen = Counter[str]()
        self.struck_at: float | None = None

    def _watched(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        inner = callback.func if isinstance(callback, partial) else callback
        if not str(getattr(inner, "__module__", "")).startswith("rollpacker."):
            return callback

        def call(*args: Any) -> None:
            self.seen[inner.__qualname__] += 1
            if inner.__qualname__ == self.victim:
                self.struck_at = self.struck_at or self.time()
                raise LookupError("struck")
            callback(*args)

        return call

    def call_soon(self, callback: Any, *args: Any, **more: Any) -> Any:
        return super().call_soon(self._watched(callback), *args, **more)

    def call_soon_threadsafe(self, callback: Any, *args: Any, **more: Any) -> Any:
        return super().call_soon_threadsafe(self._watched(callback), *args, **more)

    def call_at(self, when: float, callback: Any, *args: Any, **more: Any) -> Any:
        return super().call_at(when, self._watched(callback), *args, **more)

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:
        super().add_reader(fd, self._watched(callback), *args)

    def add_writer(self, fd: Any, callback: Any, *args: Any) -> None:
        super().add_writer(fd, self._watched(callback), *args)


class Policy(asyncio.DefaultEventLoopPolicy):
    """Makes such loops."""

    def __init__(self, victim: str) -> None:
        super().__init__()
        self.victim = victim
        self.loops: list[Loop] = []

    def new_event_loop(self) -> Loop:
        self.loops.append(Loop(self.victim))
        return self.loops[-1]


@contextmanager
def loops(victim: str = "") -> Iterator[list[Loop]]:
    policy = Policy(victim)
    asyncio.set_event_loop_policy(policy)
    try:
        yield policy.loops
    finally:
        asyncio.set_event_loop_policy(None)


@pytest.mark.parametrize("beside", [False, True])
def test_what_a_callback_raises_ends_the_work(beside: bool) -> None:
    async def fail() -> None:
        raise LookupError("of\ntwo lines")

    def strike() -> None:
        raise LookupError("of\ntwo lines")

    async def work() -> None:
        spawn(fail()) if beside else asyncio.get_running_loop().call_soon(strike)
        await asyncio.Event().wait()

    async def main() -> None:
        place = r"\(test_callbacks\.py:\d+ in (fail|strike)\)"
        with pytest.raises(RuntimeError, match=rf"^the driver failed: .* {place}$") as failed:
            await Breaker().run(work())
        assert "of two lines" in str(failed.value)

    asyncio.run(main())


def test_what_is_meant_for_people_is_told_as_it_is() -> None:
    def refuse() -> None:
        raise ValueError("data.path: no such file")

    async def work() -> None:
        asyncio.get_running_loop().call_soon(refuse)
        await asyncio.Event().wait()

    async def main() -> None:
        with pytest.raises(ValueError, match=r"^data\.path: no such file$"):
            await Breaker().run(work())
        assert await Breaker().run(asyncio.sleep(0, "as ever")) == "as ever"

    asyncio.run(main())


def test_an_error_that_nobody_asks_a_future_for_ends_nothing() -> None:
    async def work() -> int:
        asyncio.get_running_loop().create_future().set_exception(LookupError("unwanted"))
        await asyncio.sleep(0)
        return 1

    async def main() -> int:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        return await Breaker().run(work())

    assert asyncio.run(main()) == 1


def test_tasks_that_nobody_awaits_are_spawned() -> None:
    """Each that is begun otherwise in the driver is looked at where it is begun."""
    found = Counter[str]()
    for room in ("runtime", "job", "reward"):
        for path in (_SOURCE / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    found[path.name] += node.func.attr in ("create_task", "ensure_future")
    assert +found == {
        "faults.py": 2,  # the work itself, and what is spawned
        "cluster.py": 1,  # nodes that come back
        "worker_recovery.py": 1,
    }


SUPPORT = Path(__file__).parents[1] / "support"
JOBS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "graded": ({"devices__per_node": 2}, {"Link._readable", "GradingPool._on_readable"}),
    "talking": (
        {
            "devices__per_node": 1,
            "rewards": [],
            "environment": {"kind": "python", "path": f"{SUPPORT / 'talking.py'}:Echo"},
            "rollout__max_completion_length": 120,
        },
        {"Link._readable", "EnvironmentPool._on_readable", "Rewards._tell"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_a_run_ends_whichever_callback_raises(tmp_path: Path, job: str) -> None:
    """The list is what a run's loop calls."""
    shop, (changes, some) = Workshop(tmp_path, rows=6), JOBS[job]
    shop.model = write_byte_model(tmp_path / "chat-model")
    changes |= {"eval": {"data": {"path": str(shop.data)}}}
    with loops() as made:
        run(shop.config("whole", steps=2, **changes))
    names = sum((loop.seen for loop in made), Counter[str]())
    assert some <= names.keys()
    for number, name in enumerate(sorted(names)):
        with loops(name) as made, pytest.raises(RuntimeError, match=r"struck") as failed:
            run(shop.config(f"struck-{number}", steps=200, **changes))
        assert len(str(failed.value).splitlines()) == 1, name
        (loop,) = made
        assert loop.struck_at is not None
        assert loop.time() - loop.struck_at < _SOON_S, name
