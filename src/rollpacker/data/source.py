"""The order in which prompts are drawn: seeded, exactly once per epoch, resumable."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rollpacker.core.types import Prompt, PromptId
from rollpacker.data.base import DataError


class PromptStream(Protocol):
    """The source of a run's prompts. ``PromptSource`` is the usual one."""

    epoch: int
    """Epochs begun before this one."""

    @property
    def passed(self) -> float:
        """Passes over the data so far, with the fraction drawn of this one."""
        ...

    @property
    def quotas(self) -> dict[str, int]:
        """Prompts of each domain in an epoch."""
        ...

    def remaining(self) -> dict[str, int]:
        """Prompts of each domain not drawn yet in this epoch."""
        ...

    def draw(self, counts: Mapping[str, int]) -> tuple[Prompt, ...]:
        """Take the next ``counts[domain]`` prompts of each domain, or fewer at the end of the
        epoch."""
        ...

    def next_epoch(self) -> None:
        """Begin the next epoch. Prompts not drawn in this one are skipped."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ``DataError`` if the state belongs to other prompts."""
        ...


class PromptSource:
    """Draws fresh prompts per domain. Each is drawn once per epoch.

    The order depends only on seed, epoch and prompt ids, so a state is an epoch and a cursor per
    domain. The last argument has each prompt's content, by id.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        shuffle: bool = True,
        *,
        told: Mapping[PromptId, str] | None = None,
    ) -> None:
        self._prompts: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            self._prompts.setdefault(prompt.domain, []).append(prompt)
        assert len({prompt.id for prompt in prompts}) == len(prompts), "prompt ids repeat"
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = _fingerprint(self._prompts)
        self._told = _digest(told or {}, self._prompts)
        self._begin(0)

    @property
    def passed(self) -> float:
        left, whole = sum(self.remaining().values()), sum(self.quotas.values())
        return self.epoch + (1.0 - left / whole)

    @property
    def quotas(self) -> dict[str, int]:
        return {domain: len(prompts) for domain, prompts in self._prompts.items()}

    def remaining(self) -> dict[str, int]:
        return {d: len(order) - self._cursors[d] for d, order in self._order.items()}

    def draw(self, counts: Mapping[str, int]) -> tuple[Prompt, ...]:
        """Raises ``ValueError`` on an unknown domain."""
        drawn: list[Prompt] = []
        for domain, count in counts.items():
            if domain not in self._order:
                raise ValueError(f"no prompts of domain '{domain}' (known: {list(self._order)})")
            assert count >= 0
            start = self._cursors[domain]
            taken = self._order[domain][start : start + count]
            self._cursors[domain] = start + len(taken)
            drawn += taken
        return tuple(drawn)

    def next_epoch(self) -> None:
        self._begin(self.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "cursors": dict(self._cursors),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "prompts": self._fingerprint,
            "told": self._told,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["prompts"] != self._fingerprint:
            raise DataError(
                "the checkpoint was made with other data: the content of data.path has changed, or "
                "the part that is trained on (eval.fraction, data.exclude)"
            )
        if state["told"] != self._told:
            raise DataError(
                "the checkpoint was made with other prompts of the same ids: the content of "
                "data.path has changed, or the columns of the prompt (data.input_key chooses one)"
            )
        if (state["seed"], state["shuffle"]) != (self._seed, self._shuffle):
            raise DataError(
                f"the checkpoint was made with seed {state['seed']} and data.shuffle "
                f"{state['shuffle']}: its data order cannot be continued with other values"
            )
        self._begin(int(state["epoch"]))
        self._cursors |= {domain: int(n) for domain, n in state["cursors"].items()}

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        self._cursors = dict.fromkeys(self._prompts, 0)
        self._order = {domain: self._shuffled(prompts) for domain, prompts in self._prompts.items()}

    def _shuffled(self, prompts: list[Prompt]) -> list[Prompt]:
        if not self._shuffle:
            return prompts
        # A sort by keyed hash is the same in every library version, unlike generators' shuffles.
        key = f"{self._seed}/{self.epoch}".encode()
        return sorted(
            prompts,
            key=lambda p: hashlib.blake2b(p.id.encode(), key=key, digest_size=8).digest(),
        )


def _fingerprint(prompts: Mapping[str, Sequence[Prompt]]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for domain, members in prompts.items():
        for prompt in members:
            digest.update(f"{domain}\0{prompt.id}\0".encode())
    return digest.hexdigest()


def _digest(told: Mapping[PromptId, str], prompts: Mapping[str, Sequence[Prompt]]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for members in prompts.values():
        for prompt in members:
            digest.update(f"{told.get(prompt.id, '')}\0".encode(errors="surrogatepass"))
    return digest.hexdigest()
