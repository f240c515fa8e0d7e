"""``rollpacker doctor job.yaml``: does it fit, and what would."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from runtime_jobs import cli_here, write_model

from rollpacker import config
from rollpacker.job.plan.checks import check

ROOT = Path(__file__).parents[3]
SCALES = {
    ROOT / "examples" / "smollm2" / "config.yaml": ("--device", "H100"),
    ROOT / "examples" / "scale" / "one-gpu.yaml": ("--device", "H100"),
    ROOT / "examples" / "scale" / "eight-gpus.yaml": ("--device", "H100", "--gpus", 8),
    ROOT / "examples" / "scale" / "eight-gpus-separate.yaml": ("--device", "H100", "--gpus", 8),
    ROOT / "examples" / "moe" / "qwen3-30b-a3b.yaml": ("--device", "H100", "--gpus", 8),
    ROOT / "examples" / "moe" / "qwen3-next-80b-a3b.yaml": ("--device", "B200", "--gpus", 8),
    ROOT / "examples" / "moe" / "gemma3-12b.yaml": ("--device", "H100", "--gpus", 8),
    ROOT / "examples" / "cluster" / "eight-nodes.yaml": ("--device", "H100", "--gpus", 8),
}
FOUR = ROOT / "examples" / "scale" / "cpu-four.yaml"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job with a large model that nobody has."""
    tree = {
        "model": {"path": "Qwen/Qwen2.5-7B", "dtype": "bfloat16"},
        "data": {"path": "nowhere.jsonl"},
        "rewards": [{"function": "math"}],
        "rollout": {"max_completion_length": 4096},
        "train": {"micro_batch_tokens": 8192},
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_what_does_not_fit_gets_the_keys_that_make_it_fit(job: Path) -> None:
    done = cli_here("doctor", job, "--device", "h100", "--gpus", 8)
    assert done.returncode == 1
    (fix,) = (line for line in done.stdout.splitlines() if line.strip().startswith("fix: "))
    keys = [word for word in fix.split() if "=" in word]
    assert "trainer.kind=fsdp" in keys
    again = cli_here("doctor", job, *keys, "--device", "H100", "--gpus", 8)
    assert again.returncode == 0, again.stdout
    assert "ok  each H100: " in again.stdout


def test_vllm_is_offered_more_devices_for_its_weights(job: Path) -> None:
    given = ("engine={kind: vllm, gpu_memory: 0.2, max_running: 9}", "--device", "H100")
    done = cli_here("doctor", job, *given, "--gpus", 8)
    (fix,) = (line for line in done.stdout.splitlines() if line.strip().startswith("fix: "))
    keys = [word for word in fix.split() if "=" in word]
    assert "trainer.kind=fsdp" in keys
    again = cli_here("doctor", job, given[0], *keys, *given[1:], "--gpus", 8)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "weights for the engines: 15.23 GB in /dev/shm: check that" in again.stdout


def test_devices_that_decode_and_those_that_train_have_tables(job: Path) -> None:
    layout = ("engine.kind=vllm", "devices.layout=separate", "devices.training=6")
    words = (*layout, "trainer.kind=fsdp", "train.gradient_checkpointing=true")
    done = cli_here("doctor", job, *words, "--device", "H100", "--gpus", 8)
    assert "2 + 6 devices (decode + train) on 8 x H100, 8 processes" in done.stdout
    assert "each that decodes" in done.stdout
    assert "each that trains" in done.stdout
    done = cli_here("doctor", job, *words, "--device", "H100", "--gpus", 8, "--json")
    found = json.loads(done.stdout)
    held = [sum(part["gb"] for part in found[each]) for each in ("worker", "trainer")]
    assert found["needed_gb"] == pytest.approx(max(held))
    assert (found["processes"], found["tensor_parallel"]) == (8, [1])


def test_shared_memory_is_looked_at_where_it_is_this_machine_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "model")
    monkeypatch.setattr("rollpacker.job.ask.doctor.free_memory_gb", lambda: 16.0)
    words = ("doctor", FOUR, f"model.path={tmp_path / 'model'}", "rollout.max_completion_length=9")
    done = cli_here(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 devices on CPU, 8 processes, trainer fsdp, engine vllm (tensor parallel 2)" in (
        done.stdout
    )
    assert "ok  weights for the engines: 0.00 GB in /dev/shm, or in a file (" in done.stdout
    monkeypatch.setattr("rollpacker.job.ask.doctor.rooms", lambda: [(Path("/dev/shm"), 0)])
    done = cli_here(*words)
    assert done.returncode == 1
    assert "fix: make /dev/shm larger" in done.stdout


def test_a_context_that_a_response_fills_is_refused_as_train_does(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    words = (f"model.path={tmp_path / 'model'}", "rollout.max_completion_length=256")
    done = cli_here("doctor", FOUR, *words)
    assert done.returncode == 2
    assert "max_completion_length=256 leaves no room for a prompt in the model's" in done.stderr


def test_vllm_that_is_missing_here_is_said_and_is_no_failure(job: Path) -> None:
    words = ("doctor", job, "engine.kind=vllm", "model.path=Qwen/Qwen3-0.6B", "--device", "H100")
    done = cli_here(*words)
    assert done.returncode == 0, done.stdout
    assert ("vLLM is not installed here" in done.stdout) == (find_spec("vllm") is None)


def test_where_nothing_fits_the_nearest_is_said_and_what_is_left(job: Path) -> None:
    done = cli_here("doctor", job, "model.path=Qwen/Qwen2.5-72B", "--device", "L40S")
    (fix,) = (line for line in done.stdout.splitlines() if line.strip().startswith("fix: "))
    assert "model.lora_rank=16 " in fix
    assert " on 8 x L40S (" in fix
    assert "trains adapters instead of all weights, still " in fix
    assert "GB too much. Choose a smaller model, shorter responses or larger devices" in fix


def test_what_learns_the_same_comes_before_what_does_not(job: Path) -> None:
    """On more GPUs if need be; then no more keys than are needed for those that are there."""
    done = cli_here("doctor", job, "--device", "H100")
    fix, other = (line.strip() for line in done.stdout.splitlines() if line.startswith("      "))
    assert "trainer.kind=fsdp " in fix
    assert " on 2 x H100 (" in fix
    assert "lora" not in fix
    assert other.startswith("or: train.gradient_checkpointing=true model.lora_rank=16 (")
    assert other.endswith("), trains adapters instead of all weights")
    found = json.loads(cli_here("doctor", job, "--device", "H100", "--json").stdout)
    assert (found["change_devices"], "model.lora_rank" in found["change"]) == (2, False)


def test_the_micro_batch_is_the_first_key_that_is_tried(job: Path) -> None:
    spread = ("trainer.kind=fsdp", "engine={kind: vllm, tensor_parallel: 2}")
    words = ("train.gradient_checkpointing=true", "train.micro_batch_tokens=147456")
    asked = ("--device", "H100", "--gpus", 8)
    done = cli_here("doctor", job, *spread, *words, *asked)
    assert "fix: train.micro_batch_tokens=65536 (" in done.stdout
    words = (*words, "train.micro_batch_tokens=65536")
    assert cli_here("doctor", job, *spread, *words, *asked).returncode == 0


def test_several_machines(job: Path) -> None:
    """A replica over both; what the machine itself holds is of its own processes."""
    words = ("trainer.kind=fsdp", "engine={kind: vllm, tensor_parallel: 2}", "--device", "H100")
    one, two = (
        json.loads(cli_here("doctor", job, *words, *more, "--gpus", 8, "--json").stdout)
        for more in ((), ("devices.nodes=2",))
    )
    parts = [{part["name"]: part["gb"] for part in each["worker"]} for each in (one, two)]
    assert parts[1]["AdamW moments"] == pytest.approx(parts[0]["AdamW moments"] / 2)
    assert parts[1]["engine's weights"] == parts[0]["engine's weights"]
    assert (two["nodes"], two["workers"], two["processes"]) == (2, 16, 32)
    assert one["host"] == two["host"]
    done = cli_here("doctor", job, *words, "devices.nodes=2", "--gpus", 8)
    assert "16 devices on 2 nodes of 8 x H100, 32 processes" in done.stdout
    # An engine stays on its machine.
    done = cli_here(
        "doctor",
        job,
        words[0],
        "engine.kind=vllm",
        "engine.tensor_parallel=4",
        *("devices.nodes=2", "devices.per_node=2", *words[2:], "--gpus", 2),
    )
    assert "2 devices of a node that decode do not divide into engines of 4" in done.stderr


def test_more_devices_are_offered_where_one_is_too_few(job: Path) -> None:
    done = cli_here("doctor", job, "model.lora_rank=8", "--device", "L4", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert not found["fits"]
    assert found["needed_gb"] > found["memory_gb"] == 24.0
    assert found["change_devices"] >= 1
    total = sum(part["gb"] for part in found["worker"])
    assert total == pytest.approx(found["needed_gb"])


def test_this_machine_and_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "model")
    tree = {
        "model": {"path": str(tmp_path / "model")},
        "data": {"path": "nowhere.jsonl"},
        "rewards": [{"function": "math"}],
        "devices": {"kind": "cpu", "per_node": 2},
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(tree))
    monkeypatch.setattr("rollpacker.job.plan.defaults.free_memory_gb", lambda: 8.0)
    done = cli_here("doctor", path, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert found["fits"]
    assert found["memory_gb"] == pytest.approx(8 * 1.024**3)
    assert found["workers"] == found["workers_on_device"] == 2
    assert found["kv_tokens"] // found["sequences"] == 256
    monkeypatch.setattr("rollpacker.job.plan.defaults.free_memory_gb", lambda: 0.5)
    assert cli_here("doctor", path).returncode == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpus", 2), "--gpus 2: add --device"),
        (("--device", "V100"), "unknown device 'V100'"),
        (
            ("--device", "H100", "--gpus", 9),
            "--gpus 9: a machine has at most 8 H100. For more, use",
        ),
        (
            ("--device", "H100", "--gpus", 8, "devices.per_node=16"),
            "add devices.per_node=8, or spread it over several machines: devices.nodes",
        ),
        (("--device", "H100", "devices.kind=cpu"), "devices.kind=cpu keeps the job on CPUs"),
        (("--device", "H100", "trainer.kind=fsdp", "trainer.shard=2"), "trainer.shard=2: 1 dev"),
        (("--device", "H100", "rollout.max_completion_length=null"), "max_completion_length is"),
        (("--device", "H100", "devices.per_node=8"), "--gpus 1: the job asks for devices.per_node"),
        (
            ("--device", "H100", "--gpus", 3, "engine={kind: vllm, tensor_parallel: 3}"),
            "3 does not",
        ),
        (("model.pth=x",), "unknown key 'model.pth'"),
        (("--device", "H100", "model.path=lost/llama3-8b"), "; did you mean Llama-3-8B?"),
    ],
)
def test_mistakes_are_one_line(job: Path, words: tuple[object, ...], said: str) -> None:
    done = cli_here("doctor", job, *words)
    assert done.returncode == 2
    assert done.stderr.startswith("rollpacker: ")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not done.stdout


def test_a_device_alone_asks_for_the_job() -> None:
    done = cli_here("doctor", "--device", "H100")
    assert done.returncode == 2
    assert "name the job" in done.stderr


@pytest.mark.parametrize("path", SCALES, ids=lambda path: path.stem)
def test_the_examples_are_jobs_that_fit_as_their_pages_say(path: Path) -> None:
    check(config.load(path))
    done = cli_here("doctor", path, *SCALES[path])
    assert done.returncode == 0, done.stdout
    if path.parent.name in ("scale", "moe"):
        device = SCALES[path][1]
        (verdict,) = (line for line in done.stdout.splitlines() if f"each {device}: " in line)
        text = (path.parent / "README.md").read_text(encoding="utf-8")
        assert verdict.partition(f"each {device}: ")[2] in text


def test_experts_are_held_whole_and_said() -> None:
    path = ROOT / "examples" / "moe" / "qwen3-next-80b-a3b.yaml"
    done = cli_here("doctor", path, "--device", "H100", "--gpus", 8)
    assert done.returncode == 1
    assert "Instruct: 79.7B parameters, 3.87B active, bfloat16, LoRA rank 16; 4 + 4" in done.stdout
    assert "no  each H100: 161.6 of 80.0 GB" in done.stdout
    assert "loading the whole model" in done.stdout


@pytest.mark.parametrize(
    ("name", "words", "decodes", "trains", "responses"),
    [
        ("qwen3-30b-a3b", (), "67.8 GB", "63.3 GB", 234),
        ("qwen3-next-80b-a3b", (), "67.8 GB", "161.6 GB", 205),
        ("gemma3-12b", (), "50.5 GB", "0.0 GB", 38),
        ("qwen3-30b-a3b", ("model.path=google/gemma-3-27b-it",), "69.8 GB", "61.5 GB", 176),
    ],
)
def test_the_table_of_the_guide(
    name: str, words: tuple[str, ...], decodes: str, trains: str, responses: int
) -> None:
    path = ROOT / "examples" / "moe" / f"{name}.yaml"
    found = json.loads(
        cli_here("doctor", path, *words, "--device", "H100", "--gpus", 8, "--json").stdout
    )
    held = [f"{sum(part['gb'] for part in found[each]):.1f} GB" for each in ("worker", "trainer")]
    assert (held, found["sequences"]) == ([decodes, trains], responses)
    guide = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    said = [
        decodes,
        f"{responses} responses",
        *([f"{trains}: loading"] if found["trainer"] else []),
    ]
    assert all(f"| {each} |" in guide for each in said)


def test_the_built_in_engine_is_refused_for_families_that_it_does_not_run(job: Path) -> None:
    words = ("doctor", job, "model.path=Qwen/Qwen3-30B-A3B", "--device", "H100", "--gpus", 8)
    words = (*words, "engine={kind: mini}")
    done = cli_here(*words)
    assert done.returncode == 2
    assert "not 'qwen3_moe': engine.kind=vllm may run it" in done.stderr
    assert len(done.stderr.splitlines()) == 1
