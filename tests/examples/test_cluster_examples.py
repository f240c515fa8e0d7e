"""What can be checked of the cluster examples without a cluster."""

import os
import subprocess
from pathlib import Path
from typing import Any

import yaml

from rollpacker import config
from rollpacker.runtime.cluster.nodes import Node
from rollpacker.runtime.pool.placement import lay_out

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"

# Runs what follows its options, and notes both.
SRUN = """#!/bin/bash
echo "srun $*" >> "$LOG"
while [[ $1 == -* ]]; do case $1 in -w|-x) shift 2;; *) shift;; esac; done
"$@"
"""
NOTE = """#!/bin/bash
echo "$(basename "$0") $*" >> "$LOG"
"""
TRAIN = """#!/bin/bash
echo "rollpacker $*" >> "$LOG"
exit 7
"""


def test_the_job_for_eight_nodes_divides() -> None:
    chosen = config.load(FOLDER / "eight-nodes.yaml")
    places = tuple((f"cuda:{n}", ()) for n in range(chosen.devices.per_node))
    nodes = [
        Node(number=n, places=places, folder=Path(f"/run{n}")) for n in range(chosen.devices.nodes)
    ]
    posts = lay_out(chosen, nodes, (chosen.engine.tensor_parallel,), "tcp://head:1/")
    assert len({p.engine.engine for p in posts if p.engine}) == 8
    assert len({p.replica.replica for p in posts if p.replica}) == 1


def test_the_slurm_script_makes_a_cluster_and_trains_on_it(tmp_path: Path) -> None:
    stands_in = {
        "srun": SRUN,
        "ray": NOTE,
        "rollpacker": TRAIN,
        "scontrol": "#!/bin/bash\nprintf 'n1\\nn2\\nn3\\n'\n",
        "getent": "#!/bin/bash\necho 10.0.0.1 n1\n",
    }
    for name, text in stands_in.items():
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
    log = tmp_path / "log"
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(log)}
    env |= {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_NNODES": "3"}
    done = subprocess.run(
        ["bash", FOLDER / "slurm.sh", "job.yaml"], env=env, check=False, timeout=60
    )
    lines = log.read_text(encoding="utf-8").splitlines()
    assert done.returncode == 7, lines
    assert "ray start --head --node-ip-address=10.0.0.1 --port=6379 --block" in lines
    assert any(
        "--nodes=2 --ntasks=2 --overlap -x n1 ray start --address=10.0.0.1:6379" in x for x in lines
    )
    (train,) = [line for line in lines if line.startswith("rollpacker ")]
    assert train.startswith("rollpacker train job.yaml --resume auto cluster.address=10.0.0.1:6379")


def test_the_ray_job_asks_for_what_a_run_needs() -> None:
    text = (FOLDER / "kuberay.yaml").read_text(encoding="utf-8")
    job: dict[str, Any] = yaml.safe_load(text)
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    chosen = config.load(FOLDER / "eight-nodes.yaml")
    assert workers["replicas"] == workers["minReplicas"] == chosen.devices.nodes
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == str(chosen.devices.per_node)
    mounts = {each["name"] for each in container["volumeMounts"]}
    assert mounts == {each["name"] for each in workers["template"]["spec"]["volumes"]}
    assert "kueue.x-k8s.io/queue-name" in job["metadata"]["labels"]
