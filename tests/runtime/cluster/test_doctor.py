"""The doctor names what is missing and the command that mends it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollpacker.runtime.cluster import devices, machine_checks

WITHOUT_TORCH = """
import json, sys

class Blocker:
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in {"torch", "transformers", "numba"}:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)

sys.meta_path.insert(0, Blocker())
from rollpacker.runtime.cluster import machine_checks
print(json.dumps({each.name: [each.ok, each.fix] for each in machine_checks.checks()}))
"""


def by_name(found: list[machine_checks.Check]) -> dict[str, machine_checks.Check]:
    return {each.name: each for each in found}


def install_fake(folder: Path, name: str, version: str) -> None:
    """Metadata of a distribution, as pip writes it."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_every_check_has_a_fix_exactly_when_it_fails(tmp_path: Path) -> None:
    found = machine_checks.checks(tmp_path / "runs")
    assert len({each.name for each in found}) == len(found)
    for each in found:
        assert each.ok == (each.fix == ""), each
        assert each.detail
        assert "\n" not in each.detail + each.fix
    assert not (tmp_path / "runs").exists()


def test_every_package_that_a_run_needs_is_looked_at(tmp_path: Path) -> None:
    names = by_name(machine_checks.checks(tmp_path)).keys()
    wanted = {"torch", "transformers", "datasets", "reasoning-gym", "math-verify", "plotly"}
    assert wanted | {"jinja2", "numba", "pydantic"} <= names


def test_without_torch_it_still_works_and_says_how_to_get_it() -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout)
    assert found["devices"] == [False, "pip install 'rollpacker[train]'"]


def test_a_package_outside_its_range_is_named_with_both_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake(tmp_path, "torch", "1.9.0")
    install_fake(tmp_path, "plotly", "4.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = by_name(machine_checks.checks(tmp_path))
    assert not found["torch"].ok
    assert found["torch"].detail.startswith("1.9.0 is installed, ")
    assert found["torch"].detail.endswith(" is needed")
    assert found["torch"].fix == "pip install 'rollpacker[train]'"
    assert found["plotly"].fix == "pip install 'rollpacker[report]'"


def test_a_local_build_of_torch_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake(tmp_path, "torch", "2.13.0+cpu")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert by_name(machine_checks.checks(tmp_path))["torch"].ok


def test_an_output_that_cannot_be_written_names_the_place(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    check = by_name(machine_checks.checks(file))["output folder"]
    assert not check.ok
    assert str(file) in check.detail
    assert "--out" in check.fix


def test_a_usable_folder_passes(tmp_path: Path) -> None:
    found = by_name(machine_checks.checks(tmp_path))
    assert found["file locks"].ok
    assert found["disk"].ok
    assert machine_checks.free_memory_gb() > 0


# Which devices a run finds.


@pytest.mark.parametrize("driver", ["nvidiactl", "dxg"])
def test_a_driver_of_linux_or_wsl_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: str
) -> None:
    places = tuple(str(tmp_path / Path(each).name) for each in devices._DRIVERS)
    monkeypatch.setattr(devices, "_DRIVERS", places)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices._gpu_count() == 0
    (tmp_path / driver).touch()
    assert devices._gpu_count() == 2
