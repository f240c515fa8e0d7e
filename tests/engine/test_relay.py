"""The lead of an engine and its members, over scripted engines: order, answers, ends."""

import os
import pickle
import socket
import threading
import time
from contextlib import contextmanager, suppress
from multiprocessing import Pipe

import pytest
from engine_models import drain, prompt, request

from rollpacker.config import FakeEngineConfig
from rollpacker.engine import relay
from rollpacker.engine.base import Span
from rollpacker.engine.fake import FakeEngine
from rollpacker.engine.relay import Lead, follow, join, meet


class Noting(FakeEngine):
    """A scripted engine that notes what it is asked."""

    def __init__(self) -> None:
        super().__init__(FakeEngineConfig(lengths=[5, 9, 7]), concurrency=4)
        self.asked = []
        self.weights = "none yet"

    def submit(self, requests):
        self.asked.append(("submit", [r.attempt for r in requests]))
        super().submit(requests)

    def step(self):
        self.asked.append("step")
        return super().step()

    def abort(self, attempts):
        self.asked.append(("abort", list(attempts)))
        return super().abort(attempts)

    def load_weights(self, weights, version):
        self.weights = None if weights is None else dict(weights)
        self.asked.append(("load_weights", version))
        super().load_weights(None, version)

    def sleep(self):
        self.asked.append("sleep")


class Counted:
    """A connection that counts the bytes that it sends."""

    def __init__(self, connection) -> None:
        self._connection = connection
        self.sent = []

    def send_bytes(self, message):
        self.sent.append(len(message))
        self._connection.send_bytes(message)

    def __getattr__(self, name):
        return getattr(self._connection, name)


@contextmanager
def group(*members):
    """A lead over a scripted engine, members in threads, and what is sent to the first."""
    pipes = [Pipe() for _ in members]
    threads = [
        threading.Thread(target=follow, args=(engine, theirs), daemon=True)
        for engine, (_, theirs) in zip(members, pipes, strict=True)
    ]
    for thread in threads:
        thread.start()
    counted = [Counted(ours) for ours, _ in pipes]
    engine = Noting()
    yield Lead(engine, counted), engine, counted[0].sent
    for ours, _ in pipes:
        ours.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_members_make_the_same_calls_in_the_same_order():
    members = Noting(), Noting()
    with group(*members) as (lead, engine, _):
        lead.load_weights(None, 3)
        lead.submit([request(i, prompt(4), seed=i) for i in range(6)])
        lead.step()
        assert {o.attempt for o in lead.abort([1, 4, 99])} == {1, 4}
        lead.submit([request(1, prompt(4), seed=9)])
        outputs = drain(lead)
        lead.sleep()
    assert outputs.keys() == {0, 1, 2, 3, 5}
    assert {o.weights_version for o in outputs.values()} == {3}
    for member in members:
        assert member.asked == engine.asked
        assert member.stats() == engine.stats()


def test_a_step_is_one_byte_and_an_idle_one_is_none():
    with group(Noting()) as (lead, engine, sent):
        assert lead.step() == []
        assert sent == []
        lead.submit([request(i, prompt(4), seed=i) for i in range(3)])
        del sent[:]
        drain(lead)
        assert sent == [1] * engine.stats().steps


def test_what_is_refused_leaves_all_as_they_were():
    member = Noting()
    with group(member) as (lead, engine, _):
        lead.submit([request(0, prompt(4))])
        with pytest.raises(ValueError, match="attempt 0 is already held"):
            lead.submit([request(0, prompt(4))])
        with pytest.raises(RuntimeError, match="weights cannot change"):
            lead.load_weights(None, 2)
        assert drain(lead).keys() == {0}
        lead.load_weights(None, 2)
    assert member.stats() == engine.stats()
    assert member.asked == engine.asked


class Where:
    """Weights that say where they lie."""

    def __iter__(self):
        yield from {"a": 1, "b": 2}.items()


def test_weights_that_say_where_they_lie_are_not_copied():
    member = Noting()
    with group(member) as (lead, engine, sent):
        lead.load_weights(Where(), 1)
        assert sum(sent) < 200
        assert member.weights == engine.weights == {"a": 1, "b": 2}


def test_loading_waits_for_all_and_tells_who_failed():
    class Slow(Noting):
        def load_weights(self, weights, version):
            time.sleep(0.2)
            super().load_weights(weights, version)

    class Failing(Noting):
        def load_weights(self, weights, version):
            raise ValueError("no such folder")

    slow = Slow()
    with group(slow) as (lead, _, _):
        lead.load_weights(None, 5)
        assert slow.asked == [("load_weights", 5)]
    with (
        group(Noting(), Failing()) as (lead, _, _),
        pytest.raises(RuntimeError, match="process 2 of the engine alone failed: no such folder"),
    ):
        lead.load_weights(None, 5)


def test_a_member_that_has_ended_is_named():
    ours, theirs = Pipe()
    lead = Lead(Noting(), [ours])
    theirs.close()
    with pytest.raises(ConnectionError, match="process 1 of the engine has ended"):
        lead.submit([request(0, prompt(4))])


def test_an_error_of_a_step_ends_the_member():
    class Broken(Noting):
        def step(self):
            raise RuntimeError("device lost")

    ours, theirs = Pipe()
    member = Broken()
    member.submit([request(0, prompt(4))])
    ours.send_bytes(b"s")
    with pytest.raises(RuntimeError, match="device lost"):
        follow(member, theirs)


@pytest.mark.parametrize("call", ["submit", "abort"])
def test_so_does_one_of_a_call_that_nobody_waits_for(call):
    class Broken(Noting):
        def submit(self, requests):
            raise RuntimeError("CUDA out of memory")

        def abort(self, attempts):
            raise RuntimeError("CUDA out of memory")

    ours, theirs = Pipe()
    ours.send_bytes(pickle.dumps((call, ([],))))
    ours.close()
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        follow(Broken(), theirs)


def test_they_meet_in_any_order_and_leave_no_socket(tmp_path):
    spans = [Span(rank=rank, size=3, meeting=str(tmp_path / "meet")) for rank in range(3)]
    members = Noting(), Noting()

    def come(engine, span):
        follow(engine, join(span))

    threads = [
        threading.Thread(target=come, args=(engine, span), daemon=True)
        for engine, span in zip(members, spans[1:], strict=True)
    ]
    threads[1].start()
    time.sleep(0.05)
    threads[0].start()
    connections = meet(spans[0])
    assert not list(tmp_path.iterdir())
    lead = Lead(Noting(), connections)
    connections[1].send_bytes(pickle.dumps(("abort", ([7],))))
    lead.load_weights(None, 1)
    assert [m.asked for m in members] == [
        [("load_weights", 1)],
        [("abort", [7]), ("load_weights", 1)],
    ]
    for connection in connections:
        connection.close()
    for thread in threads:
        thread.join(10)


def test_who_waits_in_vain_says_for_whom(tmp_path, monkeypatch):
    monkeypatch.setattr(relay, "_PATIENCE_S", 0.05)
    lead, member = (Span(rank=r, size=2, meeting=str(tmp_path / "meet")) for r in range(2))
    with pytest.raises(TimeoutError, match=r"processes \[1\] of the engine did not connect"):
        meet(lead)
    with pytest.raises(TimeoutError, match="process 0 of the engine does not listen"):
        join(member)
    with pytest.raises(ValueError, match="too long for a socket"):
        meet(Span(size=2, meeting=str(tmp_path / ("m" * 100))))


def test_a_stranger_at_the_socket_is_no_member_and_is_not_unpickled(tmp_path):
    meeting = str(tmp_path / "meeting")
    lead, member = (Span(rank=rank, size=2, meeting=meeting) for rank in (0, 1))
    made = tmp_path / "made"

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(made),)

    def come():
        for said in (pickle.dumps(Bomb()), (7).to_bytes(4, "little"), bytes(4)):
            stranger = socket.socket(socket.AF_UNIX)
            while stranger.connect_ex(f"{meeting}.relay"):
                time.sleep(0.01)
            with suppress(OSError):
                stranger.sendall(len(said).to_bytes(4, "big") + said)
            with suppress(ConnectionError):
                assert stranger.recv(1) == b""
            stranger.close()
        join(member).send_bytes(b"here")

    thread = threading.Thread(target=come)
    thread.start()
    (known,) = meet(lead)
    assert known.recv_bytes() == b"here"
    thread.join(10)
    assert not made.exists()
