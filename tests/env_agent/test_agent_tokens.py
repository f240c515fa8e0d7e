"""A program's episode in tokens: what the model reads, and what it said stays as it was."""

import asyncio
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_programs import opened, write

from importing import imported
from rollpacker.config import EnvironmentConfig
from rollpacker.env.episode import Episode
from rollpacker.env.messages import Begin, EnvironmentAnswer, ModelReplied, packed
from rollpacker.env.template import Template
from waiting import alive

TOOLS = Path(__file__).parents[2] / "examples" / "tools"
ROW = {"question": "What is 6 * 7?", "answer": "42"}
CALLED = '{"name": "calculate", "arguments": {"expression": "6 * 7"}}'
CALL = f"<tool_call>\n{CALLED}\n</tool_call><|im_end|>"

PROGRAM = """
    TOOL = {"type": "function", "function": {"name": "calculate", "parameters": {"type": "object"}}}
    messages = [{"role": "system", "content": str(os.getpid())}, user(ROW["question"])]
    said = ask(messages, tools=[TOOL])
    (call,) = said["tool_calls"]
    answer = {"role": "tool", "tool_call_id": call["id"], "content": "42"}
    said = ask([*messages, said, answer], tools=[TOOL])
    reward(float(said["content"] == "It is 42."))
"""


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Any]:
    with imported(TOOLS, "tasks", "tools", "corpus", "prepare") as modules:
        yield modules.prepare.build_tokenizer()


def talk(
    folder: Path, tokenizer: Any, *said: tuple[str, bool], program: str = PROGRAM
) -> list[EnvironmentAnswer]:
    """The answers to an episode's beginning and to replies, ``cut`` or not."""

    def step(text: str, cut: bool) -> ModelReplied:
        ids = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        return ModelReplied(episode=1, reply=ids.tobytes(), left=1000, left_sampled=1000, cut=cut)

    async def episode() -> list[EnvironmentAnswer]:
        path = write(folder, program)
        config = EnvironmentConfig(kind="agent", path=path, step_timeout_s=60.0)
        async with opened(path) as factory:
            begin = Begin(episode=1, row=packed(ROW), prompt=[], tools=[], room=4000)
            one = Episode(config, factory, Template(tokenizer, {}), begin)
            answers = [await one.begin()]
            answers += [await one.step(step(*each)) for each in said]
            await one.close()
            return answers

    return asyncio.run(episode())


def text(tokenizer: Any, tokens: bytes) -> str:
    return tokenizer.decode(np.frombuffer(tokens, np.int32).tolist())


def test_an_episode_is_its_turns_and_what_the_program_put_between(
    tmp_path: Path, tokenizer: Any
) -> None:
    first, second, last = talk(tmp_path, tokenizer, (CALL, False), ("It is 42.<|im_end|>", False))
    prompt = text(tokenizer, first.prompt)
    assert '"name": "calculate"' in prompt
    assert prompt.endswith("<|im_start|>user\nWhat is 6 * 7?<|im_end|>\n<|im_start|>assistant\n")
    between = text(tokenizer, second.tokens)
    assert between == (
        "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert (second.calls, second.over) == (1, "")
    assert (last.over, last.reward, last.error) == ("stop", 1.0, "")
    roles = [message["role"] for message in last.messages]
    assert roles == ["assistant", "tool", "assistant"]


def test_an_episode_that_is_cut_off_ends_its_program(tmp_path: Path, tokenizer: Any) -> None:
    first, last = talk(tmp_path, tokenizer, ("It is 4", True))
    pid = text(tokenizer, first.prompt).removeprefix("<|im_start|>system\n").partition("\n")[0]
    assert (last.over, last.error, last.reward) == ("length", "", None)
    assert not alive(int(pid))


QWEN = TOOLS.parents[1] / "tests" / "env" / "support" / "templates" / "qwen3.jinja"
LOST = {
    "{'role': 'observation', 'content': 'It is dark.'}": "leaves out what role 'observation' says",
    "{'role': 'tool', 'content': None}": "a message of role 'tool' whose content is NoneType",
}


@pytest.mark.parametrize("message", LOST)
@pytest.mark.parametrize("first", [True, False])
def test_what_the_model_would_not_read_is_the_episode_s_failure(
    tmp_path: Path, tokenizer: Any, message: str, first: bool
) -> None:
    program = f"""
        messages = [user("Look."), *([{message}] if {first} else [])]
        ask([*messages, ask(messages), {message}])
    """
    qwen = copy.deepcopy(tokenizer)
    qwen.chat_template = QWEN.read_text(encoding="utf-8")
    last = talk(tmp_path, qwen, *[("I look.", False)] * (not first), program=program)[-1]
    assert LOST[message] in last.error
