"""Whatever a process of environments writes: its own episodes pay for it, and the run goes on."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from chat_models import make_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from fuzzing import Child, amiss, kill, torn
from rollpacker.config import EnvironmentConfig
from rollpacker.env.messages import Begin, EnvironmentAnswer, EnvironmentReady, ModelReplied
from rollpacker.env.processes import pool as pool_module
from rollpacker.env.processes.pool import LARGEST, EnvironmentPool, EnvironmentProcess, EpisodeReply
from rollpacker.processes.frames import DEEPEST, MOST_VALUES, Channel, check_values

TOKENIZER = make_tokenizer("qwen2_5")
ROOM = 50
pack = msgspec.msgpack.encode


class Process(Child):
    """Of environments."""

    def __init__(self) -> None:
        super().__init__()
        self.member = EnvironmentProcess(self, Channel(self.ours, LARGEST), time.monotonic())  # type: ignore[arg-type]


class Pool:
    """A pool over such processes, without a loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, processes: int) -> None:
        self.processes: list[Process] = []
        monkeypatch.setattr(pool_module, "start", self._start)
        monkeypatch.setattr("rollpacker.processes.supervised._LONGEST_PAUSE_S", 0.0)
        monkeypatch.setattr(EnvironmentProcess, "kill", kill)
        config = EnvironmentConfig(kind="python", path=["x:y"], processes=processes)
        self.pool = EnvironmentPool(config, TOKENIZER, {})
        self.replies: list[EpisodeReply] = []
        self.pool._take = lambda replies: self.replies.extend(replies)
        self._last = 0

    def _start(self, *_: Any) -> EnvironmentProcess:
        self.processes.append(Process())
        return self.processes[-1].member

    def of(self, episode: int) -> Process:
        return next(each for each in self.processes if episode in each.member.episodes)

    def begin(self, key: str = "") -> int:
        self._last += 1
        self.pool.begin(Begin(self._last, b"", [], [], ROOM), key or self._last)
        return self._last

    def step(self, episode: int) -> None:
        self.pool.step(ModelReplied(episode, b"", ROOM, ROOM))

    def hear(self) -> Sequence[EpisodeReply]:
        for process in [each for each in self.processes if each.alive]:
            if not process.member.ready:
                process.write(pack(EnvironmentReady()))
        self.pool._check()
        self.pool._go_on()
        found, self.replies = self.replies, []
        self.processes = [each for each in self.processes if each.alive]
        return found


def answers(rng: random.Random, episode: int) -> dict[str, Any]:
    """As an honest process writes them."""
    ids = np.asarray([rng.randrange(100) for _ in range(4)], np.int32).tobytes()
    messages = [{"role": "user", "content": "Yes.", "tool_calls": [{"id": "a", "n": [1, 2]}]}]
    told = {
        "type": "EnvironmentAnswer",
        "episode": episode,
        "tokens": ids,
        "seconds": 0.1,
        "reward": 0.5,
    }
    more = {"calls": 1, "failed_calls": 0, "metrics": {"a": 1.0}, "messages": messages}
    return told | more | {"prompt": ids, "over": rng.choice(("", "stop")), "error": ""}


def written(rng: random.Random, episode: int, others: Sequence[int]) -> bytes:
    """One frame of a process that holds an episode."""
    told = amiss(answers(rng, episode), rng)
    if rng.random() < 0.1:
        told = answers(rng, rng.choice((*others, -1, 2**40)))
    if rng.random() < 0.1:
        told = {
            "type": rng.choice(("EnvironmentReady", "Fatal", "ModelReplied", "?")),
            "error": "mine",
            "tools": [{}],
        }
    try:
        data = pack(told)
    except (RecursionError, OverflowError, TypeError, ValueError):
        data = b"\x91" * 3000
    return torn(data, rng) if rng.random() < 0.2 else data


def check(reply: EpisodeReply) -> None:
    """What goes on to the run."""
    answer = reply.answer
    assert type(answer) is EnvironmentAnswer
    for data in (answer.tokens, answer.prompt):
        ids = np.frombuffer(data, np.int32)
        assert len(ids) <= ROOM
        assert not len(ids) or 0 <= ids.min() <= ids.max() < max(TOKENIZER.get_vocab().values()) + 1
    assert np.isfinite([answer.seconds, answer.reward or 0.0]).all()
    assert answer.over in ("", "stop", "length")


def fuzz(monkeypatch: pytest.MonkeyPatch, count: int, seed: int) -> None:
    rng, seen = random.Random(seed), Counter[str]()
    pool = Pool(monkeypatch, 2)
    pool.hear()
    quiet, loud = pool.begin(), pool.begin("loud")
    bystander = pool.of(quiet)
    assert bystander is not pool.of(loud)
    for _ in range(count):
        pool.of(loud).write(written(rng, loud, [quiet]))
        for reply in pool.hear():
            assert reply.answer.episode == loud, f"seed {seed}"
            check(reply)
            said = reply.answer.error or reply.answer.over or "goes on"
            seen[said if "sent" not in said else "ids"] += 1
        assert bystander.alive
        assert pool.pool.broken is None
        while not any(loud in each.member.episodes for each in pool.processes):
            loud = pool.begin("loud")
            for _ in range(5):
                pool.hear()
            if loud in bystander.member.episodes:  # somewhere else
                pool.pool.close_episode(loud)
                bystander.member.abandoned = False
        if rng.random() < 0.3:
            pool.step(loud)
    bystander.write(pack(answers(rng, quiet)))
    (reply,) = pool.hear()
    assert (reply.answer.episode, reply.answer.reward) == (quiet, 0.5)
    print(f"\nseed {seed}: {count} frames of a process of environments, {len(seen)} kinds of ends")
    assert min(seen["goes on"], seen["stop"], seen["ids"]) > 5
    assert sum("nonsense" in said for said in seen) > 10


@pytest.mark.parametrize("seed", [34, pytest.param(35, marks=pytest.mark.wide)])
def test_frames_of_any_kind(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    fuzz(monkeypatch, 3000, seed)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([1, -5], "its process sent tokens with id -5: the tokenizer has ids below"),
        ([1 << 30], f"its process sent tokens with id {1 << 30}: the tokenizer has ids below"),
        ([1] * (ROOM + 1), f"its process sent tokens of {ROOM + 1} ids where {ROOM} had room"),
    ],
)
def test_token_ids_are_the_tokenizers(
    monkeypatch: pytest.MonkeyPatch, ids: list[int], said: str
) -> None:
    pool = Pool(monkeypatch, 1)
    pool.hear()
    first, other = pool.begin(), pool.begin()
    pool.of(first).write(
        pack(EnvironmentAnswer(episode=first, tokens=np.asarray(ids, np.int32).tobytes()))
    )
    (reply,) = pool.hear()
    assert reply.answer.error.startswith(said)
    assert not reply.blameless
    pool.of(other).write(pack(EnvironmentAnswer(episode=other, over="stop")))
    (reply,) = pool.hear()
    assert (reply.answer.episode, reply.answer.error) == (other, "")


def test_a_process_that_is_ready_can_stop_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(monkeypatch, 1)
    pool.hear()
    episode = pool.begin()
    pool.of(episode).write(pack({"type": "Fatal", "error": "mine"}))
    pool.of(episode).write(pack(EnvironmentReady(tools=[{"name": "mine"}])))
    assert pool.hear() == []
    assert (pool.pool.broken, pool.pool.tools) == (None, [])


def test_tools_that_fail_for_many_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a process is believed, since the answers say so too."""
    pool = Pool(monkeypatch, 1)
    pool.hear()
    for number in range(3):
        episode = pool.begin()
        process = pool.of(episode)
        process.write(pack({"type": "Fatal", "error": "tool 'odd' failed"}))
        pool.hear()
        assert pool.pool.broken is None, number
        process.write(pack(EnvironmentAnswer(episode=episode, calls=1, failed_calls=1)))
        pool.hear()
    process.write(pack({"type": "Fatal", "error": "tool 'odd' failed"}))
    pool.hear()
    assert pool.pool.broken == "environment: tool 'odd' failed"


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
    | st.binary(max_size=300),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(0, 9), inner),
)  # fmt: skip


@given(values, st.binary(max_size=100))
def test_values_are_walked_as_they_are_decoded(value: object, noise: bytes) -> None:
    check_values(pack(value))
    with suppress(ValueError):  # of keys that are lists
        check_values(noise)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xdd\xff\xff\xff\xff" + b"\x80" * (1 << 20), f"more than {MOST_VALUES} values"),
        (pack(["a"] * (MOST_VALUES + 1)), f"more than {MOST_VALUES} values"),
        (b"\x91" * 100_000, f"deeper than {DEEPEST} levels"),
        (b"\xdf\x00\x00\x00\x01\xa0" * 1000, f"deeper than {DEEPEST} levels"),
        (b"\xde\x9c\x40" + b"\x92\x00\x01\xc0" * 40_000, "a key that is a list"),
        (b"\x81\x81\xa1a\x01\x02", "a key that is a list or an object"),
    ],
)
def test_what_costs_too_much_is_not_decoded(data: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_values(data)


def test_what_is_said_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(monkeypatch, 1)
    pool.hear()
    process = pool.of(pool.begin())
    for number in range(3):
        process.write(pack(EnvironmentReady(warnings=[f"{number}/{n}" for n in range(2000)])))
        pool.hear()
    assert len(pool.pool.said()) == 100


def test_a_long_conversation_is_no_trouble(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "7" * 1000, "tool_calls": []}] * 20_000
    check_values(pack(EnvironmentAnswer(episode=1, messages=messages)))
