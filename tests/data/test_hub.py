"""Names that are nowhere: one line at once, whether the hub can be reached or not."""

import http.server
import os
import subprocess
import sys
import threading

import pytest

SCRIPT = """
from rollpacker.config import DataConfig, ModelConfig
from rollpacker.data.load import load_rows
from rollpacker.reward.judge.model import _load
from rollpacker.reward.judge.options import JudgeOptions
from rollpacker.train.card import read_card

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
for ask in asked:
    try:
        ask()
    except ValueError as error:
        print(error)
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub without models or data sets, whose connection breaks when asked for what is lost."""

    def answer(self):
        if "lost" in self.path:
            self.close_connection = True
            return
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = answer

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_names_that_are_nowhere(tmp_path, hub):
    """The libraries read the hub's address once, when imported: hence a process of its own."""
    own = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | own,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    unreachable = "and the hub, which may have a {} of that name, cannot be reached"
    folder = "there is no such folder"
    *lost, model, data = done.stdout.splitlines()
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
    assert "etry" not in done.stderr
