"""Two runs that RollMux's agents start on two rollout nodes and two training nodes.

    python -m benchmarks.mux.four_nodes --steps 8

Each node is a network namespace with an agent; rollout nodes are on CPU core 0, training nodes on
core 1, and a throttled link is between the two pools. Each run goes alone first, then both at once
under the same daemon, submitted by ``rollpacker mux submit``. Prints wall times, whether weights
are bit for bit those of the run alone, a switch against a cold start, and what crossed the link.
Needs Linux and root (or the rights to make network namespaces).
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from benchmarks._run import COMMAND, daemon, flags, summary
from benchmarks.mux.sync import _end, _inside, _wait_for_namespaces
from benchmarks.mux.two_jobs import SETTINGS, digest, phase_means, prepare, span, write_job

NODES = {"roll-0": 0, "roll-1": 0, "train-0": 1, "train-1": 1}
"""By name, and the CPU core that each is on."""
HEAD = "10.77.0.1"
PORT = 8642
LINK = "slow"
TIMEOUT_S = 540


class Network:
    """A namespace for the head and one for each node: two switches, joined by a slow link."""

    def __init__(self, stack: ExitStack, mbit: float) -> None:
        holders: list[int] = []
        for _ in (HEAD, *NODES):
            holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE)
            stack.callback(_end, holder)
            holders.append(holder.pid)
        _wait_for_namespaces(holders)
        self.head, *nodes = holders
        self.nodes = dict(zip(NODES, nodes, strict=True))
        hub = self.head
        _inside(hub, "ip link set lo up")
        for switch in ("rollout", "train"):
            _inside(hub, f"ip link add {switch} type bridge")
            _inside(hub, f"ip link set {switch} up")
        _inside(hub, f"ip address add {HEAD}/24 dev rollout")
        _inside(hub, f"ip link add {LINK} type veth peer name {LINK}-end")
        for end, switch in ((LINK, "train"), (f"{LINK}-end", "rollout")):
            _inside(hub, f"ip link set {end} master {switch} up")
            shape = f"rate {mbit}mbit burst 64kb latency 200ms"
            _inside(hub, f"tc qdisc add dev {end} root tbf {shape}")
        for number, (name, pid) in enumerate(self.nodes.items()):
            switch = "rollout" if name.startswith("roll") else "train"
            _inside(hub, f"ip link add up{number} type veth peer name net netns {pid}")
            _inside(hub, f"ip link set up{number} master {switch} up")
            _inside(pid, f"ip address add 10.77.0.{10 + number}/24 dev net")
            _inside(pid, "ip link set lo up")
            _inside(pid, "ip link set net up")

    def crossed(self) -> int:
        """Bytes that went from the training nodes' switch to the other so far."""
        words = [*within(self.head), "ip", "-s", "-j", "link", "show", LINK]
        found = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
        return found[0]["stats64"]["tx"]["bytes"]


def within(pid: int) -> list[str]:
    """Before a command: in the namespace of a process."""
    return ["nsenter", "--net", "--target", str(pid)]


@contextmanager
def cluster(folder: Path, mbit: float) -> Iterator[Network]:
    """A daemon and four agents."""
    with ExitStack() as stack:
        # Programs outlive their agent: a run that is cut short would leave them behind.
        stack.callback(subprocess.run, ["pkill", "-KILL", "-f", f"{folder}/"], check=False)
        network = Network(stack, mbit)
        new = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
        files = f"-keyout {folder}/key.pem -out {folder}/cert.pem -subj /CN=head"
        alt = f"-addext subjectAltName=IP:{HEAD}"
        subprocess.run(f"{new} {files} {alt}".split(), check=True, capture_output=True)
        pool = {"memory_gb": 4, "devices": 1}
        nodes = [
            {"name": name, "pool": "rollout" if name.startswith("roll") else "train", **pool}
            for name in NODES
        ]
        (folder / "nodes.yaml").write_text(yaml.safe_dump({"nodes": nodes}))
        words = ["--state", f"{folder}/mux", "--host", HEAD, "--port", str(PORT)]
        words += ["--inventory", f"{folder}/nodes.yaml", "--settings", SETTINGS, "--ttl", "20"]
        words += ["--tls-cert", f"{folder}/cert.pem", "--tls-key", f"{folder}/key.pem"]
        stack.enter_context(daemon(*words, before=within(network.head)))
        for name, core in NODES.items():
            words = [*within(network.nodes[name]), "taskset", "-c", str(core), *COMMAND]
            words += ["mux", "agent", *asked(folder), "--node", name]
            words += ["--pool", "rollout" if name.startswith("roll") else "train"]
            agent = subprocess.Popen([*words, "--programs", f"{folder}/{name}"])
            stack.callback(_stop, agent)
        yield network


def _stop(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    process.wait()


def asked(folder: Path) -> list[str]:
    """The options that say which daemon."""
    url, token = f"https://{HEAD}:{PORT}", f"{folder}/mux/token"
    return ["--url", url, "--token-file", token, "--cafile", f"{folder}/cert.pem"]


def mux(folder: Path, network: Network, *words: str) -> str:
    """``rollpacker mux WORDS`` at the head."""
    command = [*within(network.head), *COMMAND, "mux", *words, *asked(folder)]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S, cwd=folder
    ).stdout


def write(folder: Path, name: str, seed: int, args: argparse.Namespace) -> Path:
    """A run's configuration."""
    path = write_job(folder, name, seed, args.steps, args.length, {})
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    tree["rollout"]["num_generations"] = args.generations
    tree["engine"]["max_running"] = args.running
    tree["train"]["micro_batch_tokens"] = 2048
    tree["devices"] = {"kind": "cpu", "pin": False, "threads": 1, "nodes": 4, "per_node": 1}
    tree["devices"] |= {"layout": "separate", "training": 2}
    tree["cluster"] = {"address": "mux"}
    memory = {"rollout_memory_gb": 1.0, "train_memory_gb": 1.0}
    tree["mux"] = {"job": name, "slo": 4.0, "worst_rollout_s": 20.0, "worst_train_s": 20.0} | memory
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def run_arm(
    folder: Path, network: Network, names: list[str]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Submit jobs together and wait for them: the phases of all, and each one's attempt."""
    for name in names:
        mux(folder, network, "submit", f"{name}.yaml")
    for name in names:
        mux(folder, network, "wait", name)
    phases, attempts = [], {}
    for name in names:
        query = [*within(network.head), "curl", "-s", "--cacert", f"{folder}/cert.pem", "-H"]
        token = (folder / "mux" / "token").read_text().strip()
        query += [f"Authorization: Bearer {token}"]
        base = f"https://{HEAD}:{PORT}/v1"
        for path, take in ((f"timeline?window_s=3600&job={name}", phases), (f"jobs/{name}", None)):
            done = subprocess.run([*query, f"{base}/{path}"], capture_output=True, check=True)
            found = json.loads(done.stdout)
            if take is None:
                attempts[name] = found["program"]["attempts"]
            else:
                take.extend(found["phases"])
    return phases, attempts


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All arms; times in seconds."""
    prepare(folder)
    arms = {"alone-1": [1], "alone-2": [2], "shared": [1, 2]}
    spans, crossed, cold, means = {}, {}, {}, {}
    with cluster(folder, args.mbit) as network:
        time.sleep(3.0)
        for arm, seeds in arms.items():
            names = [f"{arm}-{seed}" for seed in seeds]
            for name, seed in zip(names, seeds, strict=True):
                write(folder, name, seed, args)
            before = network.crossed()
            phases, attempts = run_arm(folder, network, names)
            crossed[arm] = network.crossed() - before
            spans[arm] = span(phases)
            means |= phase_means(phases)
            for name in names:
                (attempt,) = attempts[name]
                first = min(phase["start"] for phase in phases if phase["job"] == name)
                cold[name] = first - attempt["began"]
    pairs = [(f"alone-{seed}-{seed}", f"shared-{seed}") for seed in (1, 2)]
    runs = [name for pair in pairs for name in pair]
    stats = {name: summary(folder / name)["mux"] for name in runs}
    model = (folder / "model-1" / "model.safetensors").stat().st_size
    alone = [spans["alone-1"], spans["alone-2"]]
    return {
        "alone_s": alone,
        "shared_s": spans["shared"],
        "ratio": spans["shared"] / sum(alone),
        "identical": [digest(folder / one) == digest(folder / two) for one, two in pairs],
        "phase_s": means,
        "warm_s": {name: each["switch_s"] / each["phases"] for name, each in stats.items()},
        "cold_s": cold,
        "model_bytes": model,
        # The weights that each run begins with are carried too.
        "copies": {arm: crossed[arm] / model / (args.steps + 1) / len(arms[arm]) for arm in arms},
        "mux": stats,
    }


def main() -> None:
    # Told to stop, it ends what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    args = flags(
        __doc__, steps=8, length=96, generations=16, running=4, mbit=400.0, json=False
    ).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), args)
    if args.json:
        print(json.dumps(found))
        return
    alone = " + ".join(f"{seconds:.1f}" for seconds in found["alone_s"])
    print(f"alone {alone} s, together {found['shared_s']:.1f} s", end="")
    print(f": {found['ratio']:.2f} of one after the other; identical: {found['identical']}")
    for name, seconds in found["phase_s"].items():
        print(f"  {name:>18}: {seconds:.2f} s a phase")
    for name, warm in found["warm_s"].items():
        cold = found["cold_s"][name]
        print(f"  {name:>18}: switch {1000 * warm:.0f} ms, cold start {cold:.1f} s", end="")
        print(f", {cold / warm:.0f} times as long")
    copies = ", ".join(f"{arm} {each:.2f}" for arm, each in found["copies"].items())
    print(
        f"copies of the model ({found['model_bytes'] / 1e6:.1f} MB) a step over the link: {copies}"
    )


if __name__ == "__main__":
    main()
