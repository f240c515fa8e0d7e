"""The core with a clock that the test turns, and requests without HTTP."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, get_type_hints

from rollpacker.core.codec import read_record
from rollpacker.rollmux.model import events as ev
from rollpacker.rollmux.model.inventory import Machine
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.service.api import bodies
from rollpacker.rollmux.service.api.roles import Refused
from rollpacker.rollmux.service.commands import commands
from rollpacker.rollmux.service.commands.writer import Answer, NoPermitYet
from rollpacker.rollmux.service.state.transaction_log import TransactionLog
from rollpacker.rollmux.service.store import Store

TTL = 10.0
SHARED = Settings(warm_s=0.0, cold_s=1.0)


class World:
    def __init__(
        self, folder: Path, settings: Settings = SHARED, machines: Sequence[Machine] = ()
    ) -> None:
        self.folder = folder
        self.machines = machines
        self.settings = settings
        self.time = 1000.0
        self._keys = count()
        self.open()

    def open(self) -> None:
        self.store = Store(self.folder / "mux.sqlite")
        self.core = TransactionLog(
            self.store, self.settings, TTL, lambda: self.time, machines=self.machines
        )

    def agents_everywhere(self) -> None:
        """Every node has had an agent that starts programs; none of them has to be heard again."""
        for name in self.core.leased.slots:
            self.core.record(ev.AgentHeard(node=name, programs=True))
        self.core.commit()

    def restart(self, down_s: float = 0.0) -> None:
        """Killed and started again: nothing but the database survives."""
        self.store.close()
        self.time += down_s
        self.open()

    def wait(self, seconds: float) -> None:
        self.time += seconds
        self.core.expire()
        self.core.commit()

    def key(self) -> str:
        return f"key-{next(self._keys)}"

    def post(
        self, act: Any, what: Any = None, body: dict[str, Any] | None = None, key: str | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Status and body; 0 where it has to wait."""
        self.core.expire()
        path = f"/{act.__name__}/{what}"
        owned = {"token": what} if act in (commands.finish, commands.abandon) else {}
        asked = bodies.asked(key or self.key(), f"POST {path}", body or {}, **owned)
        hints = get_type_hints(act)
        kind = hints.get("body") or hints.get("_")
        args = [] if what is None else [what]
        try:
            args += [] if kind is None else [read_record(body or {}, kind)]
        except ValueError as error:
            return 400, {"error": str(error)}

        def run() -> Any:
            return act(self.core, asked, *args)

        try:
            outcome = commands.once(self.core, asked, run)
        except Refused as refused:
            self.core.commit()
            return refused.status, refused.body
        self.core.commit()
        if isinstance(outcome, NoPermitYet):
            return 0, {}
        assert isinstance(outcome, Answer)
        return outcome.status, outcome.body or {}

    def beat(self, token: int, key: str | None = None) -> tuple[int, dict[str, Any]]:
        self.core.expire()
        self.core.commit()
        try:
            outcome = commands.heartbeat(self.core, bodies.asked(key or self.key(), "", {}), token)
        except Refused as refused:
            return refused.status, refused.body
        assert isinstance(outcome, Answer)
        return outcome.status, outcome.body or {}

    def submit(self, name: str, **more: Any) -> tuple[int, dict[str, Any]]:
        spec = {"id": name, "worst_rollout_s": 10.0, "worst_train_s": 10.0, "slo": 100.0}
        return self.post(commands.submit, None, spec | more)

    def ask(self, job: str, phase: str, key: str | None = None) -> tuple[int, dict[str, Any]]:
        return self.post(commands.permit, job, {"phase": phase}, key)

    def finish(
        self, token: int, seconds: float = 5.0, key: str | None = None
    ) -> tuple[int, dict[str, Any]]:
        return self.post(commands.finish, token, {"seconds": seconds}, key)

    def run(self, job: str, phase: str, takes: float = 0.0) -> dict[str, Any]:
        """A whole phase."""
        status, permit = self.ask(job, phase)
        if "move" in permit:
            assert self.post(commands.moved, job, {"move": permit["move"]["id"]})[0] == 200
            status, permit = self.ask(job, phase)
        assert status == 200, permit
        self.time += takes
        status, done = self.finish(permit["token"])
        assert status == 200, done
        return done
