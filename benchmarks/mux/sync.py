"""Weights over a slow link: RollMux's plan against flat collectives, with real processes.

    python -m benchmarks.mux.sync --mbit 100 --mib 8 --training 2 --rollout 4

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


def measure(mbit: float, mib: float, training: int, rollout: int) -> dict[str, Any]:
    """Seconds and bytes over the slow link of each way to synchronise."""
    os.environ |= {"GLOO_SOCKET_IFNAME": LINK, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    import torch
    import torch.distributed as dist

    from rollpacker.runtime.messages import weight_broadcast

    assert dist.is_gloo_available(), f"{weight_broadcast.__name__} needs gloo"
    torch.set_num_threads(1)
    model = int(mib * 2**20)
    with namespaces(mbit) as pids, tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        # Forked, torch being imported once.
        fork = multiprocessing.get_context("fork")
        ranks: list[Any] = []
        for rank in range(training + rollout):
            place = pids[0] if rank < training else pids[1]
            words = (rank, place, Path(folder), model, training, rollout)
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
        "training": training,
        "rollout": rollout,
        "ways": ways,
    }


def _enter(pid: int) -> None:
    """This thread into the network namespace of a process, as what it starts."""
    with Path(f"/proc/{pid}/ns/net").open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")


def run_rank(rank: int, place: int, folder: Path, total: int, training: int, rollout: int) -> None:
    """All ways of synchronising, one after the other; the last rank writes what it measured."""
    import torch
    import torch.distributed as dist

    from rollpacker.policy.gradients.transfer_plan import plan_transfers
    from rollpacker.runtime.messages.weight_broadcast import meet_pools

    _enter(place)
    world = training + rollout
    pools = range(training), range(training, world)
    plan = plan_transfers(total, *pools)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{HOST}:{PORT}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    meeting = f"tcp://{HOST}:{PORT}/pools"
    timeout = timedelta(seconds=TIMEOUT_S)
    groups = meet_pools(meeting, rank, training=training, world=world, timeout=timeout)
    weight_broadcast = torch.randint(256, (total,), dtype=torch.uint8, generator=torch.Generator())
    result: dict[str, Any] = {}
    for name, way in ways(plan, rank, pools, groups).items():
        model = weight_broadcast.clone() if rank < training else torch.zeros_like(weight_broadcast)
        # Before the barrier: after it, others may be sending already.
        before = received_bytes()
        dist.barrier()
        start = time.monotonic()
        way(model)
        dist.barrier()
        seconds, after = time.monotonic() - start, received_bytes()
        assert torch.equal(model, weight_broadcast), f"{name}: rank {rank} holds other weights"
        result[name] = {"seconds": seconds, "slow_bytes": after - before}
    if rank == world - 1:
        (folder / "result.json").write_text(json.dumps(result))
    dist.barrier()


def ways(
    plan: Any, rank: int, pools: tuple[range, range], groups: Any
) -> dict[str, Callable[[Any], None]]:
    """How to synchronise, by name; each takes the bytes of the model, to be sent or filled in."""
    import torch
    import torch.distributed as dist

    from rollpacker.runtime.messages.weight_broadcast import receive_weights, send_weights

    trains = rank in pools[0]
    shards = [(each.start, each.stop) for each in plan.transfers if each.slow]

    def planned(model: Any) -> None:
        if trains:
            send_weights(plan, rank, model, groups)
        else:
            receive_weights(plan, rank, model, groups)

    def flat(model: Any) -> None:
        """Every rollout rank is sent every shard."""
        if trains:
            start, stop = shards[rank]
            works = [dist.isend(model[start:stop], target) for target in pools[1]]
        else:
            works = [dist.irecv(model[a:b], source) for source, (a, b) in enumerate(shards)]
        for work in works:
            assert work is not None
            work.wait()

    def broadcast(model: Any) -> None:
        """The library's broadcast from the first training rank, which knows no topology."""
        dist.broadcast(model, src=0)

    def all_gather(model: Any) -> None:
        """The library's all-gather over both pools; rollout ranks have nothing to give."""
        mine = torch.zeros(max(stop - start for start, stop in shards), dtype=torch.uint8)
        if trains:
            start, stop = shards[rank]
            mine[: stop - start] = model[start:stop]
        parts = [torch.empty_like(mine) for pool in pools for _ in pool]
        dist.all_gather(parts, mine)
        for source, (start, stop) in enumerate(shards):
            model[start:stop] = parts[source][: stop - start]

    return {"planned": planned, "flat": flat, "broadcast": broadcast, "all_gather": all_gather}


def received_bytes() -> int:
    """Bytes that came in over the slow link into this process's namespace."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == LINK:
            return int(counts.split()[0])
    raise NoNamespacesError(f"no interface {LINK}")


def main() -> int:
    """Measure and print."""
    args = flags(__doc__, mbit=100.0, mib=8.0, training=2, rollout=4, json=False).parse_args()
    try:
        result = measure(args.mbit, args.mib, args.training, args.rollout)
    except (NoNamespacesError, FileNotFoundError) as error:
        sys.stderr.write(f"{error}\n")
        return 3
    if args.json:
        print(json.dumps(result))
        return 0
    print(f"{args.mib} MiB, {args.training} training to {args.rollout} rollout ranks,", end=" ")
    print(f"{args.mbit} Mbit/s between the pools")
    for name, way in result["ways"].items():
        print(
            f"{name:>10}: {way['seconds']:6.2f} s, {way['copies_over_slow_link']:5.2f} copies over "
            f"the slow link, {way['slower_than_planned']:4.2f}x the time"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
