"""What libraries do as they are imported, in one process that has imported none of them: it is all
that the seconds go into."""

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import gc, importlib, json, sys, traceback, torch
from rollpacker.runtime.cluster.nodes import PRELOADED

def ask(*_, **__):
    raise AssertionError("a fork of this process could not use CUDA")

found = {"preloaded": None, "answers": []}
names = ("is_available", "device_count", "init")
own = [getattr(torch.cuda, name) for name in names]
for name in names:
    setattr(torch.cuda, name, ask)
try:
    for name in PRELOADED:
        importlib.import_module(name)
except BaseException:
    found["preloaded"] = traceback.format_exc()
for name, function in zip(names, own, strict=True):
    setattr(torch.cuda, name, function)
found["collects"] = gc.isenabled()
found["frozen"] = gc.get_freeze_count()
found["imported"] = sorted(sys.modules)

from rollpacker.config import DataConfig, ModelConfig
from rollpacker.data.load import load_rows
from rollpacker.reward.judge.model import _load
from rollpacker.reward.judge.options import JudgeOptions
from rollpacker.train.model.loading import read_card

asked = (
    lambda: read_card(ModelConfig(path="lost/qwen")),
    lambda: read_card(ModelConfig(path="lost")),
    lambda: read_card(ModelConfig(path="my model/x")),
    lambda: read_card(ModelConfig(path="./qwen")),
    lambda: _load(JudgeOptions(model="lost/judge")),
    lambda: load_rows(DataConfig(path="lost/trian")),
    lambda: read_card(ModelConfig(path="known/qwen")),
    lambda: load_rows(DataConfig(path="known/trian")),
)
for question in asked:
    try:
        question()
    except ValueError as error:
        found["answers"].append(str(error))
print(json.dumps(found))
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub without models or data sets, whose connection breaks when asked for what is lost."""

    def answer(self) -> None:
        if "lost" in self.path:
            self.close_connection = True
            return
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    folder: Path = tmp_path_factory.mktemp("fresh")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    own = {"HF_ENDPOINT": address, "HF_HOME": str(folder), "NO_PROXY": "127.0.0.1"}
    try:
        return subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=os.environ | own,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def found(process: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def test_what_workers_are_forked_off_asks_for_no_device(found: dict[str, Any]) -> None:
    assert found["preloaded"] is None, found["preloaded"]
    assert {"rollpacker.runtime.worker.worker_process", "numba", "torch"} <= set(found["imported"])


def test_nothing_looks_through_it_for_garbage_and_its_workers_look_for_theirs(
    found: dict[str, Any],
) -> None:
    assert found["collects"]
    assert found["frozen"] > 100_000


def test_names_that_are_nowhere_are_one_line_at_once(
    found: dict[str, Any], process: subprocess.CompletedProcess[str]
) -> None:
    """Whether the hub, whose address is read once, can be reached or not."""
    unreachable = "and the hub, which may have a {} of that name, cannot be reached"
    folder = "there is no such folder"
    *lost, model, data = found["answers"]
    assert lost == [
        f"model.path=lost/qwen: {folder}, {unreachable.format('model')}",
        f"model.path=lost: {folder}, {unreachable.format('model')}",
        f"model.path=my model/x: {folder}, and 'my model/x' is no name of a model on the hub",
        f"model.path=./qwen: {folder}",
        f"judge: model=lost/judge: {folder}, {unreachable.format('model')}",
        "data.path: there is no file or folder 'lost/trian', " + unreachable.format("dataset"),
    ]
    assert model.startswith("model.path=known/qwen: known/qwen is not a local folder")
    assert data.startswith("data.path: 'known/trian' is no file here and cannot be loaded")
    assert "etry" not in process.stderr
