"""The examples on docs/data.md do what the page says."""

import contextlib
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from test_encode import tokenizer

from rollpacker import config
from rollpacker.data.base import DataError
from rollpacker.job.plan.build import load_data
from rollpacker.runtime.record.progress import Progress
from rollpacker.train.model.loading import Card

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
BLOCK = re.compile(r'^```(\w+) title="(.+?)"\n(.*?)\n```$', re.MULTILINE | re.DOTALL)
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% for call in m['tool_calls'] %}"
    "{{ call['function']['name'] }}{% endfor %}{% endfor %}{{ tools }}"
)


def examples() -> list[Any]:
    """Files of an example, its configuration, and what the run says."""
    files: dict[str, str] = {}
    found: list[Any] = []
    tree: dict[str, Any] = {}
    for language, title, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if language == "text":
            found.append(pytest.param(dict(files), tree, text, id=str(len(found))))
        elif language == "yaml":
            tree = yaml.safe_load(text)
        else:
            files[title] = text
            tree = {"data": {"path": title}}
    return found


@pytest.mark.parametrize(("files", "tree", "said"), examples())
def test_an_example(files, tree, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        Path(name).write_text(text + "\n", encoding="utf-8")
    with contextlib.suppress(KeyError):
        exec(files["make.py"], {})
    whole = {"model": {"path": "m"}, "rewards": [{"function": "math"}], **tree}
    out = StringIO()
    card = Card(
        kind="qwen2",
        tokenizer=tokenizer(TEMPLATE),
        context=200,
        heads=2,
        kv_heads=1,
        stop_token_ids=(),
    )
    try:
        load_data(config.parse(whole), card, Progress(Console(file=out, width=1000)))
    except DataError as error:
        out.write(str(error))
    assert out.getvalue().strip() == said


def test_the_page_has_examples():
    assert len(examples()) == 7
