"""The example's configuration, and that its program fits the model; it is run where OpenAI's client
is."""

import ast
import runpy
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import get_json_schema

from rollpacker.config import load
from rollpacker.data.load import load_rows
from rollpacker.env.agent.factory import AgentFactory

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "agent"


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(ROOT)
    return load(EXAMPLE / "config.yaml")


def test_the_configuration_runs_the_program(config: Any) -> None:
    assert config.environment is not None
    AgentFactory(config.environment)


def test_the_rows_have_what_the_program_reads(config: Any) -> None:
    rows = load_rows(config.data).rows
    assert len(rows) == 2000
    assert {"question", "answer"} <= set(rows[0].columns)


def test_the_tool_is_the_one_that_the_model_has_read() -> None:
    """To the letter, in this order: its tokenizer has one token for it."""
    tree = ast.parse((EXAMPLE / "agent.py").read_text(encoding="utf-8"))
    constants = ast.Module([n for n in tree.body if isinstance(n, ast.Assign)], [])
    found: dict[str, Any] = {}
    exec(compile(constants, "agent.py", "exec"), found)
    calculate = runpy.run_path(str(ROOT / "examples" / "tools" / "tools.py"))["calculate"]
    wanted = get_json_schema(calculate)["function"]
    assert repr(found["CALCULATE"]) == repr(wanted)
