"""Checks of this machine, each with the exact fix. They run even if torch is missing."""

from __future__ import annotations

import fcntl
import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from rollpacker.engine.base import free_bytes
from rollpacker.errors import words_of

OLDEST_PYTHON = (3, 11)
MIN_MEMORY_GB = 2.0
MIN_DISK_GB = 1.0
EXTRAS = ("train", "report")
_GB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check. ``ok``: whether it passed. A missing optional part passes. ``fix``:
    the command or the change that mends it, empty if ``ok``."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


def checks(output: Path = Path("runs")) -> list[Check]:
    """Run all checks in order. ``output`` is the folder for runs."""
    found = [_python(), *_packages(), _cpu(), _memory(), devices(), _mini_engine(), _vllm_engine()]
    found.append(_sandbox())
    return [*found, *_output(output), _pipes()]


def _check(name: str, ok: bool, detail: str, fix: str) -> Check:
    return Check(name=name, ok=ok, detail=detail, fix="" if ok else fix)


def _python() -> Check:
    wanted = ".".join(map(str, OLDEST_PYTHON))
    detail = f"{platform.python_version()} at {sys.executable}"
    return _check(
        "python", sys.version_info >= OLDEST_PYTHON, detail, f"install Python {wanted} or later"
    )


def _packages() -> list[Check]:
    found: list[Check] = []
    for extra in ("", *EXTRAS):
        fix = f"pip install 'rollpacker[{extra}]'" if extra else "pip install rollpacker"
        for requirement in _requirements(extra):
            ok, detail = _installed(requirement)
            found.append(_check(requirement.name, ok, detail, fix))
    return found


def _requirements(extra: str) -> list[Requirement]:
    try:
        lines = importlib.metadata.requires("rollpacker") or []
    except importlib.metadata.PackageNotFoundError:
        lines = ["rollpacker"]
    every = [Requirement(line) for line in lines]
    if not extra:
        return [each for each in every if each.marker is None]
    return [each for each in every if each.marker and each.marker.evaluate({"extra": extra})]


def _installed(requirement: Requirement) -> tuple[bool, str]:
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return False, "not installed"
    if requirement.specifier.contains(version, prereleases=True):
        return True, version
    return False, f"{version} is installed, {requirement.specifier} is needed"


def _cpu() -> Check:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return _check("cpu", True, f"{usable} of {os.cpu_count()} cores, {platform.machine()}", "")


def _memory() -> Check:
    free = free_memory_gb()
    fix = f"stop other programs until {MIN_MEMORY_GB:.0f} GB are free, or use a larger machine"
    return _check("memory", free >= MIN_MEMORY_GB, f"{free:.1f} GB free", fix)


def free_memory_gb() -> float:
    """Free memory of the machine, or of the container if that has less."""
    return free_bytes() / _GB


def devices() -> Check:
    """Check the GPUs, which are optional. A driver that torch cannot use fails."""
    driver = shutil.which("nvidia-smi") is not None
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return _check("devices", False, words_of(error), "pip install 'rollpacker[train]'")
    threads = torch.get_num_threads()
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return _check("devices", True, f"{len(names)} GPU: {', '.join(names)}", "")
    if driver and torch.version.cuda:
        fix = f"update the NVIDIA driver to one for CUDA {torch.version.cuda}"
        return _check("devices", False, "there is a GPU, but torch cannot use it", fix)
    build = ", and torch is a CPU build" if driver else ""
    return _check("devices", True, f"no GPU, {threads} CPU threads{build}", "")


def _mini_engine() -> Check:
    try:
        importlib.import_module("rollpacker.engine.mini")
    except ImportError as error:
        return _check("engine mini", False, words_of(error), "pip install 'rollpacker[train]'")
    return _check("engine mini", True, "ready", "")


def _vllm_engine() -> Check:
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return _check("vllm", True, "not installed (optional)", "")
    return _check("vllm", True, version, "")


def _sandbox() -> Check:
    """Run hostile programs at each level. Only reward ``code`` needs a working level."""
    if sys.platform != "linux":
        return _check("code sandbox", True, "needs Linux (optional: for reward 'code')", "")
    sandbox = importlib.import_module("rollpacker.sandbox")
    level = sandbox.strongest_level()
    detail = "no level works" if level is None else f"level {level} and weaker ones hold"
    fix = "use Linux 5.13 or later with seccomp and Landlock, or no reward 'code'"
    return _check("code sandbox", level is not None, detail, fix)


def _output(folder: Path) -> list[Check]:
    """Check the folder of runs, or its nearest existing parent: writable, free space, locks."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    another = "run with --out FOLDER on another disk"
    try:
        with tempfile.NamedTemporaryFile(dir=place) as file:
            locks = _lockable(file.fileno())
    except OSError as error:
        detail = f"{place}: {error.strerror}"
        return [
            _check("output folder", False, detail, f"run with --out FOLDER, or chmod u+w {place}")
        ]
    free = shutil.disk_usage(place).free / _GB
    return [
        _check("output folder", True, f"{place} is writable", ""),
        _check("disk", free >= MIN_DISK_GB, f"{free:.1f} GB free at {place}", another),
        _check(
            "file locks", locks, f"flock at {place}", f"{another}: this file system has no flock"
        ),
    ]


def _lockable(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _pipes() -> Check:
    """Check that enough pipes for workers and reward processes can be opened."""
    ends: list[int] = []
    try:
        for _ in range(32):
            ends += os.pipe()
    except OSError as error:
        return _check("pipes", False, words_of(error), "raise the open-files limit: ulimit -n 1024")
    finally:
        for end in ends:
            os.close(end)
    return _check("pipes", True, "64 more files can be opened", "")
