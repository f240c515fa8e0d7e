"""Weights over a slow link: one copy against flat collectives, with real processes.

    python -m benchmarks.mux.sync --mbit 100 --mib 8 --rollout 4

Two network namespaces are joined by a throttled pair of virtual interfaces; training ranks run in
one, rollout ranks in the other. Both namespaces are anonymous: they vanish with this process,
however it ends. Needs Linux and root (or the rights to make network namespaces).
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks._run import flags

LINK = "slow"
HOST, PEER = "10.77.0.1", "10.77.0.2"
PORT = 29517
TIMEOUT_S = 120


class NoNamespacesError(RuntimeError):
    """This machine does not let us make network namespaces."""


@contextmanager
def namespaces(mbit: float) -> Iterator[tuple[int, int]]:
    """Two namespaces joined by a link of ``mbit`` Mbit/s each way: the pids that hold them."""
    with ExitStack() as stack:
        pids: list[int] = []
        for _ in range(2):
            # cat ends when our end of its pipe closes: nothing is left behind, even by kill -9.
            holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE)
            stack.callback(_end, holder)
            pids.append(holder.pid)
        _wait_for_namespaces(pids)
        train, rollout = pids
        _inside(train, f"ip link add {LINK} type veth peer name {LINK} netns {rollout}")
        for pid, address in ((train, HOST), (rollout, PEER)):
            _inside(pid, f"ip address add {address}/30 dev {LINK}")
            _inside(pid, "ip link set lo up")
            _inside(pid, f"ip link set {LINK} up")
            shape = f"rate {mbit}mbit burst 16kb latency 200ms"
            _inside(pid, f"tc qdisc add dev {LINK} root tbf {shape}")
        yield train, rollout


def _end(process: subprocess.Popen[Any]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    if process.poll() is None:
        process.kill()
    process.wait()


def _wait_for_namespaces(pids: list[int]) -> None:
    ours = os.readlink("/proc/self/ns/net")
    until = time.monotonic() + 5
    while time.monotonic() < until:
        try:
            if all(os.readlink(f"/proc/{pid}/ns/net") != ours for pid in pids):
                return
        except OSError:
            break
        time.sleep(0.01)
    raise NoNamespacesError("cannot make network namespaces here: run as root on Linux")


def _inside(pid: int, command: str) -> None:
    words = ["nsenter", "--net", "--target", str(pid), *command.split()]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=20)
    if done.returncode:
        raise NoNamespacesError(f"{command}: {done.stderr.strip()}")


def measure(mbit: float, mib: float, rollout: int) -> dict[str, Any]:
    """Seconds and bytes over the slow link of each way to synchronise."""
    os.environ |= {"GLOO_SOCKET_IFNAME": LINK, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    import torch
    import torch.distributed as dist

    assert dist.is_gloo_available()
    torch.set_num_threads(1)
    model = int(mib * 2**20)
    with namespaces(mbit) as pids, tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        # Forked, torch being imported once.
        fork = multiprocessing.get_context("fork")
        ranks: list[Any] = []
        for rank in range(1 + rollout):
            place = pids[1] if rank else pids[0]
            words = (rank, place, Path(folder), model, 1 + rollout)
            ranks.append(fork.Process(target=run_rank, args=words))
            ranks[-1].start()
            stack.callback(ranks[-1].kill)
        until = time.monotonic() + TIMEOUT_S
        for process in ranks:
            process.join(max(until - time.monotonic(), 0.0))
            if process.exitcode != 0:
                raise RuntimeError("a rank failed; see above")
        ways = json.loads((Path(folder) / "result.json").read_text())
    for way in ways.values():
        way["copies_over_slow_link"] = way["slow_bytes"] / model
        way["slower_than_planned"] = way["seconds"] / ways["planned"]["seconds"]
    return {
        "model_bytes": model,
        "mbit_per_s": mbit,
        "rollout": rollout,
        "ways": ways,
    }


def _enter(pid: int) -> None:
    """This thread into the network namespace of a process, as what it starts."""
    with Path(f"/proc/{pid}/ns/net").open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")


def run_rank(rank: int, place: int, folder: Path, total: int, world: int) -> None:
    """All ways of synchronising, one after the other; the last rank writes what it measured."""
    import torch
    import torch.distributed as dist

    from rollpacker.runtime.worker.weight_relay import meet

    _enter(place)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{HOST}:{PORT}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    groups = meet(f"tcp://{HOST}:{PORT}/pools", rank, world)
    weights = torch.randint(256, (total,), dtype=torch.uint8, generator=torch.Generator())
    result: dict[str, Any] = {}
    for name, way in ways(rank, world, groups).items():
        model = torch.zeros_like(weights) if rank else weights.clone()
        # Before the barrier: after it, others may be sending already.
        before = received_bytes()
        dist.barrier()
        start = time.monotonic()
        way(model)
        dist.barrier()
        seconds, after = time.monotonic() - start, received_bytes()
        assert torch.equal(model, weights), f"{name}: rank {rank} holds other weights"
        result[name] = {"seconds": seconds, "slow_bytes": after - before}
    if rank == world - 1:
        (folder / "result.json").write_text(json.dumps(result))
    dist.barrier()


def ways(rank: int, world: int, groups: Any) -> dict[str, Callable[[Any], None]]:
    """How to synchronise, by name; each takes the bytes of the model, to be sent or filled in."""
    import torch.distributed as dist

    from rollpacker.runtime.worker.weight_relay import carry

    def planned(model: Any) -> None:
        carry(model, rank, *groups)

    def flat(model: Any) -> None:
        """Every rollout rank is sent everything."""
        works = [dist.irecv(model, 0)] if rank else []
        works += [dist.isend(model, each) for each in range(1, world) if rank == 0]
        for work in works:
            assert work is not None
            work.wait()

    def broadcast(model: Any) -> None:
        """The library's broadcast, which knows no topology."""
        dist.broadcast(model, src=0)

    return {"planned": planned, "flat": flat, "broadcast": broadcast}


def received_bytes() -> int:
    """Bytes that came in over the slow link into this process's namespace."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == LINK:
            return int(counts.split()[0])
    raise NoNamespacesError(f"no interface {LINK}")


def main() -> int:
    """Measure and print."""
    args = flags(__doc__, mbit=100.0, mib=8.0, rollout=4, json=False).parse_args()
    try:
        result = measure(args.mbit, args.mib, args.rollout)
    except (NoNamespacesError, FileNotFoundError) as error:
        sys.stderr.write(f"{error}\n")
        return 3
    if args.json:
        print(json.dumps(result))
        return 0
    print(f"{args.mib} MiB to {args.rollout} rollout ranks,", end=" ")
    print(f"{args.mbit} Mbit/s between the pools")
    for name, way in result["ways"].items():
        print(
            f"{name:>10}: {way['seconds']:6.2f} s, {way['copies_over_slow_link']:5.2f} copies over "
            f"the slow link, {way['slower_than_planned']:4.2f}x the time"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
