"""What a release may hold: the check that ``.ci/wheel.py`` makes of the archives."""

import runpy
from pathlib import Path

import pytest

from rollpacker import __version__

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / ".ci" / "wheel.py"))
TRACKED = {"src/rollpacker/__init__.py", "src/rollpacker/report/templates/page.css"}
SDIST = TRACKED | SCRIPT["BESIDE"] | {".gitignore"}
WHEEL = {path.removeprefix("src/") for path in TRACKED} | {
    f"rollpacker-{__version__}.dist-info/METADATA"
}


def test_the_package_and_what_builds_it_are_all() -> None:
    assert SCRIPT["complaints"](SDIST, WHEEL, TRACKED) == []


@pytest.mark.parametrize(
    "junk", ["runs/job/journal.jsonl", ".venv/bin/python", ".venv-vllm/x.pth", "src/notes.txt"]
)
def test_junk_is_named(junk: str) -> None:
    found = SCRIPT["complaints"](SDIST | {junk}, WHEEL | {junk}, TRACKED)
    assert found == [f"the sdist holds {junk}", f"the wheel holds {junk}"]


@pytest.mark.parametrize("lost", sorted(TRACKED))
def test_a_file_of_the_package_that_is_lost_is_named(lost: str) -> None:
    inside = lost.removeprefix("src/")
    found = SCRIPT["complaints"](SDIST - {lost}, WHEEL - {inside}, TRACKED)
    assert found == [f"the sdist lacks {lost}", f"the wheel lacks {inside}"]


def test_what_it_takes_to_build_is_missed() -> None:
    assert SCRIPT["complaints"](SDIST - {"pyproject.toml"}, WHEEL, TRACKED) == [
        "the sdist lacks pyproject.toml"
    ]


def test_every_supported_python_is_one_that_the_metadata_allow() -> None:
    project = SCRIPT["PROJECT"]
    named = [line for line in project["classifiers"] if "Python :: 3." in line]
    assert named[0].endswith(project["requires-python"].removeprefix(">="))
