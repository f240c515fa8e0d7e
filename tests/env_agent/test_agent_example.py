"""The example's configuration, and that its program fits the model; it is run where OpenAI's client
is."""

import ast
import runpy
from importlib.util import find_spec
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
    """As a function, where OpenAI's client is, and as a program."""
    assert config.environment is not None
    program = {"path": ["examples/agent/agent.py"]}
    AgentFactory(config.environment.model_copy(update=program))
    if find_spec("openai") is not None:
        AgentFactory(config.environment)


def test_the_rows_have_what_the_program_reads(config: Any) -> None:
    rows = load_rows(config.data).rows
    assert len(rows) == 640
    assert {"question", "answer"} <= set(rows[0].columns)


def test_the_tool_is_the_one_that_the_model_has_read() -> None:
    """To the letter, in this order: its tokenizer has one token for it."""
    tree = ast.parse((EXAMPLE / "agent.py").read_text(encoding="utf-8"))
    assigned = [n for n in tree.body if isinstance(n, ast.Assign)]
    schema = [n for n in assigned if isinstance(n.value, ast.Dict)]
    constants = ast.Module(schema, [])
    found: dict[str, Any] = {}
    exec(compile(constants, "agent.py", "exec"), found)
    calculate = runpy.run_path(str(ROOT / "examples" / "tools" / "tools.py"))["calculate"]
    wanted = get_json_schema(calculate)["function"]
    assert repr(found["CALCULATE"]) == repr(wanted)
