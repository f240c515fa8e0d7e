import errno
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_files import child, intact, names, save, saved, writer

from rollpacker.runtime.record import checkpoint as module
from rollpacker.runtime.record.checkpoint import CheckpointError, Checkpoints, search, verify


def test_round_trip(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run")
    assert checkpoints.latest() is None
    path = save(checkpoints, 7, writer(7), {"seed": 7, "queue": ["a", "b"], "rng": [2**63, 0.1]})
    found = Checkpoints(tmp_path / "run").latest()
    assert found is not None
    assert (found.step, found.path) == (7, path)
    assert found.state == {"seed": 7, "queue": ["a", "b"], "rng": [2**63, 0.1]}
    assert intact(found)
    manifest = json.loads((path / "MANIFEST").read_text())["files"]
    assert manifest["model.safetensors"]["size"] == 300
    assert set(manifest) == {
        "config.json",
        "model.safetensors",
        "optimizer/rank0/shard.bin",
        "state.json",
    }


def test_steps_are_ordered_as_numbers(tmp_path):
    found = saved(tmp_path, 9, 10).latest()
    assert found is not None
    assert found.step == 10


@pytest.mark.parametrize("keep", [2, 3])
def test_retention(tmp_path, keep):
    saved(tmp_path, *range(1, 7), keep=keep)
    assert names(tmp_path) == [f"checkpoint-{n}" for n in range(7 - keep, 7)]


def test_keep_below_two_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint\.keep"):
        Checkpoints(tmp_path, 1)


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path):
    saved(tmp_path, 1, 2)
    (tmp_path / "checkpoint-2" / "config.json").write_bytes(b"")
    checkpoints = Checkpoints(tmp_path, 2)
    assert checkpoints.latest().step == 1
    save(checkpoints, 3, writer(3), {"seed": 3})
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    save(checkpoints, 4, writer(4), {"seed": 4})
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-4"]


def test_other_folders_are_left_alone(tmp_path):
    for name in ("checkpoint-best", ".tmp-mine", "checkpoints"):
        (tmp_path / name).mkdir(parents=True)
    saved(tmp_path, 1, 2, 3)
    assert {"checkpoint-best", ".tmp-mine", "checkpoints"} < set(names(tmp_path))


def test_same_step_is_replaced(tmp_path):
    saved(tmp_path, 1, 2)
    (tmp_path / "checkpoint-2" / "config.json").write_bytes(b"broken")
    found = saved(tmp_path, 2).latest()
    assert found is not None
    assert found.step == 2
    assert intact(found)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]


def damage(folder, numbers):
    """Change one thing below ``folder``; returns what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = numbers.choice(files)
    data = bytearray(path.read_bytes())
    kind = numbers.choice(["flip", "tear", "grow", "zero", "remove", "add", "swap"])
    at = numbers.randrange(len(data))
    if kind == "flip":
        data[at] ^= 1 << numbers.randrange(8)
    elif kind == "tear":
        data = data[:at]
    elif kind == "grow":
        data += numbers.randbytes(1)
    elif kind == "zero":
        data[at] = data[at] ^ 0xFF if data[at] == 0 else 0
    path.write_bytes(data)
    if kind == "remove":
        path.unlink()
    elif kind == "add":
        path.with_name("stray.bin").write_bytes(b"")
    elif kind == "swap":
        other = numbers.choice([file for file in files if file != path])
        first, second = path.read_bytes(), other.read_bytes()
        path.write_bytes(second)
        other.write_bytes(first)
    return f"{kind} {path.name} at {at}"


def test_every_corruption_is_caught(tmp_path):
    run = tmp_path / "run"
    saved(run, 1, 2)
    spare = shutil.copytree(run / "checkpoint-2", tmp_path / "spare")
    for seed in range(200):
        done = damage(run / "checkpoint-2", random.Random(seed))
        found, problems = search(run)
        assert found is not None, done
        assert found.step == 1, done
        assert len(problems) == 1, done
        assert problems[0].startswith("checkpoint-2 is not usable: "), done
        shutil.rmtree(run / "checkpoint-2")
        shutil.copytree(spare, run / "checkpoint-2")
    assert verify(run / "checkpoint-2") is None


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda p: (p / "config.json").unlink(), "missing file config.json"),
        (lambda p: (p / "new").write_text(""), "extra file new"),
        (lambda p: os.truncate(p / "model.safetensors", 9), "model.safetensors is torn: 9 bytes"),
        (lambda p: (p / "config.json").write_bytes(bytes(300)), "config.json changed"),
        (lambda p: (p / "MANIFEST").unlink(), "MANIFEST"),
        (lambda p: os.truncate(p / "MANIFEST", 40), "MANIFEST is damaged"),
        (lambda p: (p / "MANIFEST").write_text("[" * 99999), "MANIFEST is damaged"),
        (lambda p: (p / "MANIFEST").write_text('{"files": 3}'), "MANIFEST is damaged"),
    ],
)
def test_problems_name_the_file(tmp_path, harm, words):
    saved(tmp_path, 1, 2)
    harm(tmp_path / "checkpoint-2")
    checkpoints = Checkpoints(tmp_path)
    found = checkpoints.latest()
    assert found is not None
    assert found.step == 1
    assert words in checkpoints.problems[0]


def test_nothing_usable(tmp_path):
    saved(tmp_path, 1, 2)
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}" / "state.json").unlink()
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() is None
    assert len(checkpoints.problems) == 2


# Disk full and other errors


def full_disk(folder):
    (folder / "model.safetensors").write_bytes(bytes(100))
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def native_full_disk(folder):
    raise RuntimeError("PytorchStreamWriter failed: No space left on device (os error 28)")


@pytest.mark.parametrize("write", [full_disk, native_full_disk])
def test_write_reports_a_full_disk(tmp_path, write):
    checkpoints = saved(tmp_path, 1, 2)
    with pytest.raises(CheckpointError, match=r"checkpoint-3: no space left: free some"):
        save(checkpoints, 3, write, {})
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    save(checkpoints, 3, writer(3), {"seed": 3})
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_other_errors_pass_and_leave_nothing(tmp_path, error):
    def write(folder):
        (folder / "part").write_bytes(b"x")
        raise error

    checkpoints = saved(tmp_path, 1)
    with pytest.raises(error):
        save(checkpoints, 2, write, {})
    assert names(tmp_path) == ["checkpoint-1"]


@pytest.mark.parametrize("limit", [100, 299, 500])
def test_file_size_limit(tmp_path, limit):
    """A real error of the kernel: in the model's files, or later in the manifest."""
    checkpoints = saved(tmp_path, 1, 2)

    def act():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(CheckpointError, match="no space left"):
            save(checkpoints, 3, writer(3), {"seed": 3})

    assert child(act) == 0
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    found = checkpoints.latest()
    assert found is not None
    assert found.step == 2


def test_real_full_disk(tmp_path):
    """A tmpfs of 64 KiB in a user namespace; skipped where the system forbids that."""
    script = (
        "import sys; from pathlib import Path\n"
        "from rollpacker.runtime.record.checkpoint import *\n"
        "c = Checkpoints(Path(sys.argv[1]) / 'run')\n"
        "w = lambda n: lambda p: (p / 'w').write_bytes(bytes(n)) and None\n"
        "s = lambda n, f, x: (c.write(n, f, x), c.commit(n))\n"
        "s(1, w(9000), {}); s(2, w(9000), {})\n"
        "for n in (60000, 20481, 90000):\n"
        "    try: s(3, w(n), {}); raise SystemExit('saved')\n"
        "    except CheckpointError as error: assert 'no space left' in str(error)\n"
        "    assert c.latest().step == 2 and not c.problems\n"
        "s(3, w(9000), {}); print('done', c.latest().step)\n"
    )
    mount = f"mount -t tmpfs -o size=64k none {tmp_path} 2>/dev/null || exit 99; exec "
    command = [sys.executable, "-c", script, str(tmp_path)]
    quoted = " ".join(f"'{part}'" if part != script else '"$0"' for part in command)
    result = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount + quoted, script],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode in (1, 99) and "done" not in result.stdout and not result.stderr.strip():
        pytest.skip("no user namespaces with tmpfs here")
    assert result.stdout == "done 3\n", result.stderr


def test_flushes_come_before_the_rename(tmp_path, monkeypatch):
    """Power loss cannot be staged, but the order of the calls that guard against it can be seen."""
    calls = []
    fsync, rename = os.fsync, Path.rename

    def seen_fsync(handle):
        calls.append(("sync", Path(os.readlink(f"/proc/self/fd/{handle}"))))
        fsync(handle)

    def seen_rename(path, target):
        calls.append(("rename", path))
        return rename(path, target)

    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(Path, "rename", seen_rename)
    save(checkpoints, 1, writer(1), {"seed": 1})
    folder = tmp_path / ".tmp-checkpoint-1"
    at = calls.index(("rename", folder))
    before = [path for what, path in calls[:at] if what == "sync"]
    everything = {path.relative_to(tmp_path / "checkpoint-1") for path in _tree(tmp_path)}
    assert everything | {Path(".")} == {path.relative_to(folder) for path in before}
    assert before[-1] == folder
    assert before.index(folder / "MANIFEST") > before.index(folder / "optimizer/rank0/shard.bin")
    assert calls[at + 1] == ("sync", tmp_path)


def _tree(folder):
    return (folder / "checkpoint-1").rglob("*")


def test_what_is_not_committed_yet_is_no_checkpoint_and_each_byte_is_read_once(
    tmp_path, monkeypatch
):
    checkpoints = saved(tmp_path, 1, 2)
    read = []
    entry = module._entry
    monkeypatch.setattr(module, "_entry", lambda path: read.append(path.name) or entry(path))
    checkpoints.write(3, writer(3), {"seed": 3})
    assert names(tmp_path) == [".tmp-checkpoint-3", "checkpoint-1", "checkpoint-2"]
    assert checkpoints.latest().step == 2
    read.clear()
    checkpoints.commit(3)
    assert sorted(read) == ["config.json", "model.safetensors", "shard.bin", "state.json"]
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3"]
    again = Checkpoints(tmp_path)
    assert again.latest().step == 3


def test_one_that_cannot_be_committed_leaves_the_others(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path, 1, 2)
    checkpoints.write(3, writer(3), {"seed": 3})

    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "sync", full)
    with pytest.raises(CheckpointError, match="checkpoint-3: no space left"):
        checkpoints.commit(3)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    assert not list(tmp_path.glob(".*"))
