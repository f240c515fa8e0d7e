import socket

from hypothesis import given
from hypothesis import strategies as st

from rollpacker.processes.frames import LARGEST_REPLY, Channel, PeerState, frame
from rollpacker.reward.processes.worker import Driver


@given(
    payloads=st.lists(st.binary(max_size=40), max_size=8),
    sizes=st.lists(st.integers(1, 30), max_size=30),
)
def test_frames_arrive_whole_however_they_are_cut(payloads, sizes):
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    with theirs:
        data = b"".join(frame(p) for p in payloads)
        got: list[bytes] = []
        for size in [*sizes, len(data)]:
            theirs.sendall(data[:size])
            data = data[size:]
            frames, state = channel.receive()
            assert state is PeerState.OPEN
            got += frames
    frames, state = channel.receive()
    assert got + frames == payloads
    assert state is PeerState.CLOSED
    channel.close()


def test_sending_keeps_what_does_not_fit():
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    data = bytes(range(256)) * 20_000
    with theirs:
        assert not channel.send(data)
        got = bytearray()
        while len(got) < len(data):
            got += theirs.recv(1 << 16)
            channel.flush()
        assert bytes(got) == data
        assert not channel.unsent
    channel.send(b"to nobody")
    assert not channel.unsent
    channel.close()


def test_good_frames_before_a_bad_one_are_kept():
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    with theirs:
        theirs.sendall(frame(b"good") + (LARGEST_REPLY + 1).to_bytes(4, "little"))
        assert channel.receive() == ([b"good"], PeerState.BROKEN)
    channel.close()


def test_a_driver_that_leaves_before_it_has_read_everything_is_gone() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        driver = Driver(ours)
        driver.say("nobody reads this")
        theirs.close()
        assert driver.next() is None


def test_long_frames_come_in_pieces_between_short_ones() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    payloads = [b"a", bytes(300_000), b"", b"b" * 65_533, b"c" * LARGEST_REPLY, b"d" * 65_532, b"e"]
    data, got = b"".join(map(frame, payloads)), list[bytes]()
    with theirs:
        theirs.setblocking(False)
        while data:
            data = data[theirs.send(data[:50_001]) :]
            frames, state = channel.receive()
            assert state is PeerState.OPEN
            got += frames
    assert got + channel.receive()[0] == payloads
    channel.close()
