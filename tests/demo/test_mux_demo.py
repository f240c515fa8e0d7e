"""``rollpacker mux demo``: its daemon, agents and jobs are real processes."""

from pathlib import Path

import psutil
import pytest

from rollpacker.demo.model import build_model, build_tokenizer
from rollpacker.demo.mux import JOBS, run_jobs, service, write_jobs

pytestmark = pytest.mark.wide


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    build_model(0).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def of_folder(folder: Path) -> list[list[str]]:
    """Command lines of processes that name it."""
    words = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    return [each for each in words if any(str(folder) in word for word in each)]


def test_two_jobs_share_two_nodes_and_nothing_is_left(tmp_path: Path, model: Path) -> None:
    said: list[str] = []
    with service(tmp_path / "out") as here:
        found = run_jobs(here, write_jobs(tmp_path / "out", 2, model), said.append)
        assert {job["iterations"] for job in found["jobs"].values()} == {2}
        assert {*found["jobs"]} == {*JOBS}
        assert all(0.0 < share <= 1.0 for share in found["busy"].values())
    assert said[0] == "job ada submitted"
    assert not of_folder(tmp_path / "out")


def test_a_job_that_fails_is_named(tmp_path: Path) -> None:
    with service(tmp_path / "out") as here:
        (tmp_path / "no model").mkdir()
        jobs = write_jobs(tmp_path / "out", 2, tmp_path / "no model")
        with pytest.raises(RuntimeError, match="job ada failed with exit code 2"):
            run_jobs(here, jobs, lambda _text: None)
