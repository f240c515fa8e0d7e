"""Tries what `make dist` has built as users get it: in bare environments outside the clone.

    python .ci/wheel.py [--demo] [PYTHON ...]

Without a PYTHON: every one of this machine that pyproject.toml names. With `--demo` it installs
`[all]` too and trains with it. Prints a line for each; what fails ends it.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "requirements" / "constraints.txt"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BESIDE = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
"""What an sdist holds besides the package; the build tool adds .gitignore."""
NOT_PASSED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
"""Variables that would let the clone into the environments, or slow them."""
IMPORT = """
import time
start = time.perf_counter()
import rollpacker
print(time.perf_counter() - start, rollpacker.__file__, rollpacker.__version__)
"""


def tell(command: list[str | Path], folder: Path) -> str:
    """What a command prints; where it fails, all of it is shown and this ends."""
    env = {name: value for name, value in os.environ.items() if name not in NOT_PASSED}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        words = " ".join(str(word).strip() for word in command)
        sys.exit(f"{done.stdout}{done.stderr}\nfailed with {done.returncode}: {words}")
    return done.stdout


def complaints(sdist: set[str], wheel: set[str], tracked: set[str]) -> list[str]:
    """What the archives lack or hold too much of; paths without the sdist's own folder.

    The wheel is built from the sdist, so what both hold is enough to build it.
    """
    package = {path.removeprefix("src/") for path in tracked}
    code = {path for path in wheel if ".dist-info/" not in path}
    found = [f"the sdist lacks {path}" for path in (tracked | BESIDE) - sdist]
    found += [f"the sdist holds {path}" for path in sdist - tracked - BESIDE - {".gitignore"}]
    found += [f"the wheel lacks {path}" for path in package - code]
    found += [f"the wheel holds {path}" for path in code - package]
    return sorted(found)


def built() -> tuple[Path, Path]:
    """The wheel and the sdist of dist/, the only ones there; their contents are right."""
    wheels, sdists = list(ROOT.glob("dist/*.whl")), list(ROOT.glob("dist/*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        sys.exit("error: dist/ is to hold one wheel and one sdist: make dist")
    listed = subprocess.check_output(["git", "ls-files", "-z", "src"], cwd=ROOT, text=True)
    with tarfile.open(sdists[0]) as archive:
        names = [PurePosixPath(each.name) for each in archive if each.isfile()]
    wrong = complaints(
        {"/".join(each.parts[1:]) for each in names},
        set(zipfile.ZipFile(wheels[0]).namelist()),
        set(listed.split("\0")) - {""},
    )
    if wrong:
        sys.exit("\n".join(["error: dist/ is not what git knows of src/", *wrong[:20]]))
    return wheels[0], sdists[0]


def pythons() -> list[str]:
    """Of each supported version the first that starts: on PATH, or of pyenv."""
    last = "Programming Language :: Python :: 3."
    minors = [line.removeprefix(last) for line in PROJECT["classifiers"] if line.startswith(last)]
    found = []
    for minor in minors:
        named = shutil.which(f"python3.{minor}")
        kept = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))
        for path in [*([named] if named else []), *map(str, kept)]:
            # pyenv leaves commands on PATH for versions that are not switched on.
            if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
                found.append(path)
                break
    return found


def megabytes(*paths: Path) -> float:
    """Of files and folders."""
    files = [each for path in paths for each in ([path] if path.is_file() else path.rglob("*"))]
    return sum(each.stat().st_size for each in files if each.is_file()) / 1e6


def installed(python: str, what: str, folder: Path) -> tuple[Path, float]:
    """The commands' folder of a new environment with this in it, and its size without pip."""
    tell([python, "-m", "venv", folder], folder.parent)
    command = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--prefer-binary"]
    tell([*command, "--constraint", CONSTRAINTS, what], folder.parent)
    (packages,) = folder.glob("lib/python*/site-packages")
    return folder / "bin", megabytes(*(p for p in packages.iterdir() if not p.match("pip*")))


def base(python: str, wheel: Path, scratch: Path) -> str:
    """What must work without torch; returns what it took."""
    bin_, size = installed(python, str(wheel), scratch / "base")
    tell([bin_ / "rollpacker", "--help"], scratch)
    times = []
    for _ in range(5):
        took, place, version = tell([bin_ / "python", "-c", IMPORT], scratch).split()
        if not Path(place).is_relative_to(scratch) or version != PROJECT["version"]:
            sys.exit(f"error: {place} {version} was imported, not the wheel")
        times.append(float(took))
    start = time.monotonic()
    tell([bin_ / "rollpacker", "--help"], scratch)
    help_s = time.monotonic() - start
    words = [bin_ / "rollpacker", "trace", "generate", "math", "--steps", "4", "--out", "x.parquet"]
    tell(words, scratch)
    said = tell([bin_ / "rollpacker", "estimate", "--from", "x.parquet", "--json"], scratch)
    gain = json.loads(said)["modes"]["exact"]["speedup"]
    (scratch / "program.py").write_text("print(sum(map(int, input().split())))\n")
    (scratch / "tests.json").write_text(json.dumps([{"stdin": "1 2\n", "stdout": "3\n"}]))
    # The level that needs no more than seccomp.
    words = ["sandbox", "run", "program.py", "--tests", "tests.json", "--level", "basic"]
    tell([bin_ / "rollpacker", *words], scratch)
    return (
        f"base {size:.0f} MB, import {1e3 * statistics.median(times):.1f} ms,"
        f" --help {help_s:.2f} s, estimate of exact {gain:.2f}x, sandbox ran"
    )


def demo(python: str, wheel: Path, scratch: Path) -> str:
    """A real training run of the wheel; returns what came of it."""
    bin_, size = installed(python, f"{wheel}[all]", scratch / "all")
    start = time.monotonic()
    tell([bin_ / "rollpacker", "demo", "--quick", "--out", "demo"], scratch)
    took = time.monotonic() - start
    if not (scratch / "demo" / "report.html").is_file():
        sys.exit("error: the demo wrote no report")
    summary = json.loads((scratch / "demo" / "demo.json").read_text(encoding="utf-8"))
    accuracies = {"before": summary["before"], **summary["modes"]}
    shown = (f"{name} {each['sampled_accuracy']:.3f}" for name, each in accuracies.items())
    return f"[all] {size:.0f} MB, demo --quick {took:.0f} s, accuracy {', '.join(shown)}"


def main() -> None:
    """Look at the archives, then try the wheel with each Python."""
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("--demo", action="store_true", help="install [all] too and train")
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="default: all supported")
    wanted = parser.parse_args()
    wheel, sdist = built()
    print(f"{wheel.name} {megabytes(wheel):.2f} MB, {sdist.name} {megabytes(sdist):.2f} MB")
    for python in wanted.pythons or pythons():
        with tempfile.TemporaryDirectory() as folder:
            scratch = Path(folder).resolve()
            said = [tell([python, "--version"], scratch).strip(), base(python, wheel, scratch)]
            if wanted.demo:
                said.append(demo(python, wheel, scratch))
        print("; ".join(said), flush=True)


if __name__ == "__main__":
    main()
