"""The examples of RollMux on shared clusters, as far as one machine can tell."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from mux_real_daemon import Daemon, spec
from typer.testing import CliRunner

from rollpacker import config
from rollpacker.cli import app
from rollpacker.core.codec import read_record
from rollpacker.rollmux.scheduler import inventory_file
from rollpacker.rollmux.service.api.bodies import NewJob
from rollpacker.rollmux.service.client import Phases
from rollpacker.rollmux.service.job.submission import read_submission
from waiting import until

FOLDER = Path(__file__).parents[2] / "examples" / "mux"
OURS = f"""#!/bin/bash
exec {sys.executable} -c 'from rollpacker.cli import main; main()' "$@"
"""
SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames n[1-4]" ] && printf 'localhost\\nn2\\nn3\\nn4\\n'
"""
# Runs a task on each node of -w, and passes the end of the step on to all that they started.
SRUN = """#!/bin/bash
echo "srun $*" >> "$LOG"
while [[ $1 == -* ]]; do case $1 in -w) list=$2; shift 2;; *) shift;; esac; done
for node in ${list//,/ }; do SLURMD_NODENAME=$node setsid "$@" & tasks+=" $!"; done
trap 'for task in $tasks; do kill -TERM -- "-$task"; done' TERM
wait; wait
"""


def test_the_inventory_is_one() -> None:
    made = inventory_file.read(FOLDER / "inventory.yaml")
    assert len(made.machines) == 32
    assert sum(team.rollout for team in made.teams) == 16


@pytest.fixture
def data_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the data that the example's run names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").touch()


@pytest.mark.usefixtures("data_here")
def test_the_run_is_submitted_as_a_job_that_fits_the_inventory() -> None:
    assert config.load(FOLDER / "job.yaml").mux.team == "math"
    body = json.dumps(read_submission(FOLDER / "job.yaml"))
    made = read_record(json.loads(body), NewJob)
    assert made.program is not None
    assert made.program.command[:4] == ("{python}", "-m", "rollpacker", "train")
    assert made.train_memory_gb < 1536


def test_a_run_without_its_data_is_refused_before_nodes_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    where = f"data.path: there is no 'train.jsonl' in {tmp_path}"
    with pytest.raises(ValueError, match=re.escape(where)):
        read_submission(FOLDER / "job.yaml")
    run = yaml.safe_load((FOLDER / "job.yaml").read_text(encoding="utf-8"))
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(run | {"model": {"path": "./no-model"}}))
    with pytest.raises(ValueError, match=r"model.path: there is no './no-model'"):
        read_submission(file)
    # The last ones may be there on the nodes alone.
    for path in (
        "org/name",
        "rg:gcd",
        "tasks.py:rows",
        "part-*.jsonl",
        "/local/d.jsonl",
        "~/d.csv",
    ):
        file.write_text(yaml.safe_dump(run | {"data": {"path": path}}))
        assert read_submission(file)["team"] == "math"


@pytest.mark.usefixtures("data_here")
def test_a_run_says_about_how_many_steps_are_left(tmp_path: Path) -> None:
    run = yaml.safe_load((FOLDER / "job.yaml").read_text(encoding="utf-8"))
    file = tmp_path / "job.yaml"

    def told(**changes: int) -> int | None:
        file.write_text(yaml.safe_dump(run | {"output": str(tmp_path / "run")} | changes))
        body = read_submission(file)
        assert body["iterations"] is None, "one that is started again does some steps again"
        return body["expected_iterations"]

    assert told(steps=40) == 40
    (tmp_path / "run" / "checkpoint-15").mkdir(parents=True)
    assert told(steps=40) == 25
    assert told(steps=15) == 1
    assert told(steps=0) is None, "nobody knows yet how many epochs are"


@pytest.mark.usefixtures("data_here")
@pytest.mark.parametrize(
    ("devices", "gpus"),
    [
        ({"kind": "cuda", "per_node": 4}, 4),
        ({"kind": "cuda", "per_node": 3, "per_gpu": 2}, 2),
        ({"kind": "cuda"}, 1),  # as many as the node has
        ({"kind": "cpu", "per_node": 4}, 1),
    ],
)
def test_a_run_on_gpus_asks_for_nodes_that_have_them(
    devices: dict[str, object], gpus: int, tmp_path: Path
) -> None:
    run = yaml.safe_load((FOLDER / "job.yaml").read_text(encoding="utf-8"))
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(run | {"devices": devices}))
    assert read_submission(file)["node_devices"] == gpus


def test_the_specification_is_one() -> None:
    made = read_record(read_submission(FOLDER / "program.yaml"), NewJob)
    assert made.program is not None
    assert made.program.command[1] == "examples/mux/loop.py"
    assert made.program.restarts == 3


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One that takes a lease for lost only long after a test."""
    running = Daemon(tmp_path_factory.mktemp("mux"), ttl=600.0)
    yield running
    running.stop()


def looping(daemon: Daemon, job: str, kept: Path, seconds: float) -> subprocess.Popen[str]:
    """The example's loop, of a job that is there by now, in its first rollout."""
    daemon.job(job)
    words = [sys.executable, "-u", str(FOLDER / "loop.py"), "--job", job, "--kept", str(kept)]
    words += ["--mux", daemon.url, str(daemon.token_file), "", "--seconds", str(seconds)]
    loop = subprocess.Popen([*words, "--iterations", "2"], stdout=subprocess.PIPE, text=True)
    assert loop.stdout is not None
    assert loop.stdout.readline().startswith("iteration 0: rollout on")
    return loop


def test_the_loop_gives_its_nodes_back_when_it_is_stopped(daemon: Daemon, tmp_path: Path) -> None:
    loop = looping(daemon, "stopped", tmp_path / "kept", 600)
    loop.terminate()
    assert loop.wait(timeout=60) == 128 + signal.SIGTERM
    found = daemon.client().job("stopped")
    assert (found["permit"], found["next"]) == (None, "rollout")
    daemon.client().end("stopped")


def test_the_loop_goes_on_after_a_failed_node_and_in_the_middle_of_an_iteration(
    daemon: Daemon, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    loop = looping(daemon, "displaced", kept, 0.5)
    daemon.client().node_failed(daemon.client().job("displaced")["rollout_nodes"][0], "fire")
    assert loop.wait(timeout=60) == 0
    assert kept.read_text() == "2"
    daemon.client().end("displaced")
    # Somebody else's rollout: the next start finds the daemon before the training.
    mux = Phases(daemon.client(), "half-done")
    mux.submit(spec("half-done"))
    with mux.phase("rollout"):
        pass
    words = [sys.executable, str(FOLDER / "loop.py"), "--job", "half-done", "--kept", str(kept)]
    words += ["--mux", daemon.url, str(daemon.token_file), "", "--seconds", "0"]
    os.link(kept, before := tmp_path / "before")
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    assert (before.read_text(), kept.read_text()) == ("2", "5"), "never half written"
    assert daemon.finished("half-done")[:2] == ["rollout", "train"]


def objects() -> list[dict[str, Any]]:
    text = (FOLDER / "kubernetes.yaml").read_text(encoding="utf-8")
    return list(yaml.safe_load_all(text))


def test_the_kubernetes_objects_fit_the_schemas_of_kubernetes() -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for each in objects():
        schemas.validate(each, schemas.latest_version(), strict=True)


def test_the_kubernetes_objects_fit_each_other() -> None:
    found = {(each["kind"], each["metadata"]["name"]): each for each in objects()}
    assert {each["metadata"]["namespace"] for each in found.values()} == {"rollmux"}
    inventory_file.parse(yaml.safe_load(found["ConfigMap", "rollmux"]["data"]["nodes.yaml"]))
    (port,) = found["Service", "rollmux"]["spec"]["ports"]
    for (kind, name), each in found.items():
        if kind not in ("Deployment", "DaemonSet"):
            continue
        spec = each["spec"]["template"]["spec"]
        labels = each["spec"]["template"]["metadata"]["labels"]
        assert each["spec"]["selector"]["matchLabels"] == labels
        volumes = {volume["name"] for volume in spec["volumes"]}
        containers = spec["containers"] + spec.get("initContainers", [])
        assert volumes == {mount["name"] for one in containers for mount in one["volumeMounts"]}
        (container,) = spec["containers"]
        words = [*container["command"], *container["args"]]
        if kind == "Deployment":
            assert found["Service", "rollmux"]["spec"]["selector"] == labels
            assert port["targetPort"] in {one["name"] for one in container["ports"]}
            assert each["spec"]["strategy"]["type"] == "Recreate"
        else:
            assert words[words.index("--url") + 1] == "https://rollmux.rollmux.svc:8642"
            pool = {one["name"]: one.get("value") for one in container["env"]}["POOL"]
            assert spec["nodeSelector"] == {"rollmux/pool": pool}
            assert name == f"rollmux-{pool}"
        takes(words)


def takes(words: list[str]) -> None:
    """Whether ``rollpacker mux`` knows all options of a command line."""
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*words[1:3], "--help"])
    assert done.exit_code == 0, done.output
    known = done.stdout
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    assert [option for option in options if f"{option} " not in known] == []


class Allocation:
    """The script in an allocation of four nodes, which are all this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "shared"
        self.folder.mkdir()
        (self.folder / "nodes.yaml").write_text("nodes: []\nteams: [{name: a, rollout: 1}]\n")
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        for name, text in {"rollpacker": OURS, "scontrol": SCONTROL, "srun": SRUN}.items():
            (bin_folder / name).write_text(text, encoding="utf-8")
            (bin_folder / name).chmod(0o755)
        self.log = folder / "log"
        number = str(random.randrange(19_000) + 500)
        self.state = Path(f"/tmp/rollmux-{number}")
        env = os.environ | {"PATH": f"{bin_folder}:{os.environ['PATH']}", "LOG": str(self.log)}
        self.env = env | {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_JOB_ID": number}
        self.script = subprocess.Popen(
            ["bash", FOLDER / "slurm.sh", self.folder, "2"], env=self.env, start_new_session=True
        )

    def mux(self, *words: str, ok: bool = True) -> str:
        url = (self.folder / "url").read_text().strip()
        where = ["--url", url, "--token-file", str(self.folder / "token")]
        where += ["--cafile", str(self.folder / "cert.pem")]
        done = CliRunner().invoke(app, ["mux", *words, *where])
        assert done.exit_code == 0 or not ok, done.output
        return done.stdout

    def reporting(self) -> list[tuple[str, str]]:
        nodes = json.loads(self.mux("node", "list", "--json"))["nodes"]
        return sorted((node["name"], node["pool"]) for node in nodes if node["agent"])

    def submit(self, name: str, command: str) -> None:
        file = self.folder / f"{name}.yaml"
        spec = {"id": name, "worst_rollout_s": 9, "worst_train_s": 9, "team": "a", "slo": 1.0}
        spec |= {"rollout_memory_gb": 0.1, "train_memory_gb": 0.1}
        file.write_text(yaml.safe_dump(spec | {"program": {"command": command}}))
        self.mux("submit", str(file))

    def close(self) -> None:
        if self.script.poll() is None:
            os.killpg(self.script.pid, 9)
        for path in Path("/tmp").glob(f"{self.state.name}*"):
            shutil.rmtree(path)


@pytest.mark.wide
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_the_slurm_script_shares_its_allocation(tmp_path: Path) -> None:
    subprocess.run(["bash", "-n", FOLDER / "slurm.sh"], check=True)
    allocation = Allocation(tmp_path)
    try:
        until((allocation.folder / "url").exists, within_s=120.0)
        nodes = [("localhost", "rollout"), ("n2", "rollout"), ("n3", "train"), ("n4", "train")]
        until(lambda: allocation.reporting() == nodes, within_s=120.0)
        allocation.submit("short", "echo on {node}")
        assert allocation.mux("wait", "short") == "job short: done\n"
        assert allocation.mux("logs", "short") in ("on localhost\n", "on n2\n")
        kept = allocation.folder / "kept"
        stays = f'trap "touch {kept}; exit 1" TERM; echo up; while :; do sleep 0.1; done'
        allocation.submit("long", f"bash -c '{stays}'")
        until(lambda: "up" in allocation.mux("logs", "long", ok=False), within_s=120.0)
        allocation.script.terminate()
        allocation.script.wait(timeout=120)
        assert kept.exists()
        steps = [line for line in allocation.log.read_text().splitlines() if "-w n3,n4" in line]
        assert "--nodes=2 --ntasks=2" in steps[0]
    finally:
        allocation.close()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_the_units_of_the_documentation_are_ones(tmp_path: Path) -> None:
    page = (FOLDER.parents[1] / "docs" / "mux_operate.md").read_text(encoding="utf-8")
    units = re.findall(r"```ini\n# /etc/systemd/system/(\S+)\n(.*?)```", page, re.S)
    assert len(units) == 2
    for name, text in units:
        (command,) = re.findall(r"^ExecStart=(.*(?:\\\n.*)?(?:\\\n.*)?)$", text, re.M)
        takes(command.replace("\\\n", " ").split())
        unit = tmp_path / name
        unit.write_text(text.replace("/opt/rollpacker/bin/rollpacker", "/bin/true"))
        asked = ["systemd-analyze", "verify", "--man=no", str(unit)]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        assert [line for line in done.stderr.splitlines() if name in line] == []
