"""A configuration without a learning rate gets one that suits its model."""

import math
import re
import shutil
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from runtime_jobs import Workshop, asked_today, metrics, run

from rollpacker import config, job
from rollpacker.runtime.record.progress import Progress
from rollpacker.train.state.schedule import default_learning_rate

STORED = Path(__file__).parents[2] / "stored" / "v0_1_0"


@pytest.mark.parametrize(
    ("parameters", "lora", "rate"),
    [
        (70_000_000_000, False, 1e-6),
        (7_600_000_000, False, 1e-6),
        (494_000_000, False, 3.8e-6),
        (134_500_000, False, 7.2e-6),
        (200_000, False, 1.9e-4),
        (7_600_000_000, True, 1e-5),
        (494_000_000, True, 3.8e-5),
    ],
)
def test_smaller_models_and_adapters_take_larger_steps(parameters, lora, rate):
    assert default_learning_rate(parameters, lora=lora) == rate


def without_rate(shop: Workshop, name: str, **changes) -> config.RunConfig:
    tree = shop.tree(name, devices__per_node=1, **changes)
    del tree["train"]["learning_rate"]
    return config.parse(tree)


def test_a_run_says_and_keeps_the_rate_that_it_chose(tmp_path):
    shop = Workshop(tmp_path)
    folder, said = run(without_rate(shop, "run", steps=1))
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    rate = saved["train"]["learning_rate"]
    (line,) = re.findall(r"train\.learning_rate: (\S+), for (\S+)k parameters", said)
    assert float(line[0]) == rate > 1e-4
    assert float(line[1]) < 100
    assert metrics(folder)[0]["learning_rate"] == rate


def test_a_run_goes_on_with_the_rate_of_its_checkpoint(tmp_path, monkeypatch):
    """Also where it comes from the version whose default was a number."""
    shutil.copytree(STORED, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    tree = yaml.safe_load(asked_today(Path()).read_text())
    del tree["train"]["learning_rate"]
    quiet = Progress(Console(quiet=True))
    loaded = config.parse(tree | {"steps": 7, "eval": None})
    rows = metrics(job.train(loaded, resume=True, progress=quiet))
    assert rows[-1]["step"] == 6
    cosine = 0.5 * (1 + math.cos(math.pi * 6 / 7))
    assert rows[-1]["learning_rate"] == pytest.approx(0.01 * cosine)
