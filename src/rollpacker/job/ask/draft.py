"""``rollpacker init``: a first configuration that suits the model and the data."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

import yaml

from rollpacker.config import DataConfig, ModelConfig, RunConfig, parse
from rollpacker.data.base import Message, Row
from rollpacker.data.encode import encode_prompts
from rollpacker.data.load import Answers, load_guessed
from rollpacker.engine.mini.runner import SUPPORTED
from rollpacker.job.plan.checks import check, check_ends
from rollpacker.job.plan.defaults import count_model
from rollpacker.job.plan.problems import load_data
from rollpacker.reward.functions import BUILT_IN
from rollpacker.runtime.attempts.rewards import check_rows
from rollpacker.runtime.cluster.machine_checks import free_memory_gb
from rollpacker.runtime.record.progress import Progress
from rollpacker.sim.costs.models import WeightCount
from rollpacker.train.model.loading import Card, read_card
from rollpacker.train.state.optimizer import default_learning_rate

_ANSWERS: dict[str, Answers] = {"math": "needed", "rg": "needed", "code": "unused"}
_PROMPTS_PER_STEP = 16
_FEW_ROWS = 64
_FRACTION = 0.1
_LEAST_RESPONSE = 16
_SHORT_ROOM = 128
_LARGE = 1e9
_SHORT, _LONG = 1024, 4096
"""The longest responses (tokens) of models below and above that size."""
_BYTES_A_PARAMETER = 18
"""Weights in two types at worst, gradients, and AdamW's moments."""
_BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """The user's choices.

    Args:
        model: folder or hub name.
        data: as ``data.path``.
        reward: as ``rewards[].function``.
        held_out: as ``eval.data.path``. Empty for none.
        steps: of the run. 0 for one pass over the data.
    """

    model: str
    data: str
    reward: str
    held_out: str = ""
    steps: int = 0


@dataclass(slots=True, kw_only=True)
class _Facts:
    card: Card
    count: WeightCount
    gpus: int
    rows: list[Row]
    data: dict[str, Any]
    longest: int
    warnings: list[str] = field(default_factory=list)


def draft(wishes: Wishes, progress: Progress) -> tuple[str, list[str]]:
    """Return a commented job file that trains as it is, and points to consider first. Raises
    ``ValueError`` if model, data and reward cannot make a job."""
    _check_reward(wishes.reward)
    facts = _look(wishes)
    text = _text(wishes, facts)
    config = parse(yaml.safe_load(text), "the new job")
    _check(config, facts.card, progress)
    return text, [*facts.warnings, *check_ends(config, facts.card)]


def _check(config: RunConfig, card: Card, progress: Progress) -> None:
    check(config)
    problems, held_out = load_data(config, card, progress)
    every = [*problems.rows.values(), *(held_out.rows.values() if held_out else ())]
    check_rows(config.rewards, every)


def _check_reward(function: str) -> None:
    if function == "judge":
        raise ValueError("--reward judge needs a model and options: see docs/judge.md")
    place, colon, name = function.rpartition(":")
    if not colon and function not in BUILT_IN and not Path(function).expanduser().is_dir():
        raise ValueError(
            f"--reward {function}: expected math, code, rg, path/to/file.py:name, "
            "package.module:name or the folder of a reward model"
        )
    if not place.endswith(".py"):
        return
    file = Path(place).expanduser()
    if not file.is_file():
        raise ValueError(f"--reward {function}: no file '{place}'")
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"--reward {function}: '{place}' is not Python: {error}") from None
    if not any(name in _names(node) for node in tree.body):
        raise ValueError(f"--reward {function}: '{place}' has no function '{name}'")


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _look(wishes: Wishes) -> _Facts:
    import torch

    model = ModelConfig(path=wishes.model)
    card = read_card(model)
    data, rows, warnings = _read(wishes.data, _ANSWERS.get(wishes.reward, "taken"))
    data |= _instructions(wishes.reward, rows, card, warnings)
    if wishes.held_out == wishes.data:
        warnings.append("the training problems are also those of the evaluation: it shows no skill")
    elif Path(wishes.held_out).is_file():
        data["exclude"] = wishes.held_out
    config = DataConfig.model_validate({**data, "overlong": "skip"})
    encoded = encode_prompts(rows, card.tokenizer, config, card.context, _LEAST_RESPONSE)
    if encoded.skipped:
        data["overlong"] = "skip"
        warnings.append(
            f"{len(encoded.skipped)} of {len(rows)} prompts fill the model's context of "
            f"{card.context} tokens and are left out"
        )
    facts = _Facts(
        card=card,
        count=count_model(wishes.model),
        gpus=torch.cuda.device_count(),
        rows=[row for row in rows if row.id in encoded.tokens],
        data=data,
        longest=max(len(tokens) for tokens in encoded.tokens.values()),
        warnings=warnings,
    )
    facts.warnings += _warnings(wishes, facts)
    return facts


def _read(path: str, answers: Answers) -> tuple[dict[str, Any], list[Row], list[str]]:
    """Return the keys of ``data`` that read the rows, the rows, and warnings."""
    found = load_guessed(DataConfig(path=path), answers)
    warnings = [f"{found.skipped}, and the new job skips them too"] if found.skipped else []
    if found.columns:
        warnings.append(
            f"data.input_key: '{found.keys['input_key']}' is used as the prompt, a guess among "
            f"{list(found.columns)}"
        )
    if answers == "taken" and found.keys.get("label_key") == "":
        warnings.append(
            "data.label_key: no column is used as the answer. If a reward reads one (TRL's "
            "'answer', verl's 'ground_truth'), set its name here: one of "
            f"{list(found.rows[0].columns)}"
        )
    return {"path": path, **found.keys}, found.rows, warnings


def _instructions(
    reward: str, rows: Sequence[Row], card: Card, warnings: list[str]
) -> dict[str, Any]:
    """Return keys of ``data`` that ask the model for the format that the reward reads."""
    plain = all(isinstance(row.prompt, str) for row in rows)
    template = bool(card.tokenizer.chat_template)
    if plain and not template:
        warnings.append(
            "the tokenizer has no chat template: prompts are used as they are, which suits base "
            "models"
        )
    if reward != "math" or any("boxed" in str(row.prompt) for row in rows[:20]):
        return {}
    ends = {"user"} if plain else {turn["role"] for row in rows for turn in _turns(row)[-1:]}
    if template and not any(turn["role"] == "system" for row in rows for turn in _turns(row)[:1]):
        return {"system_prompt": _BOXED}
    # A system prompt would replace the rows' own.
    if plain or (template and ends <= {"user"}):
        return {"prompt_template": f"{{prompt}}\n{_BOXED}" + "\n" * (not template)}
    warnings.append("no row asks for the answer in \\boxed{}, where 'math' looks first")
    return {}


def _turns(row: Row) -> list[Message]:
    return [] if isinstance(row.prompt, str) else row.prompt


def _warnings(wishes: Wishes, facts: _Facts) -> list[str]:
    found: list[str] = []
    room = facts.card.context - facts.longest
    if room < _SHORT_ROOM:
        found.append(
            f"the longest prompt leaves {room} of the context's {facts.card.context} tokens for "
            "a response"
        )
    if len(facts.rows) < _FEW_ROWS:
        found.append(f"{len(facts.rows)} prompts are few: the model may memorize them")
    if not wishes.held_out and len(facts.rows) < _FEW_ROWS:
        found.append(
            "no problems are held out, so accuracy is not measured: use --eval-data PATH, or set "
            "eval.fraction"
        )
    if facts.gpus == 0 and facts.count.active > _LARGE:
        found.append("no GPU: a step of a model of this size takes many minutes on CPUs")
    needed = _BYTES_A_PARAMETER * facts.count.total / 1024**3
    if facts.gpus == 0 and needed > free_memory_gb():
        found.append(
            f"training all weights takes about {needed:.1f} GB in each worker, and "
            f"{free_memory_gb():.1f} GB are free: set model.lora_rank, or use a smaller model"
        )
    return found


_JOB = Template(
    """\
# rollpacker train FILE
# Every key, with its default: docs/config.md
output: $output
$until

model:
  path: $model
  dtype: $dtype              # of forward and backward, the optimizer keeps float32
  # lora_rank: 16            # train adapters instead of all weights

data:                        # $rows prompts, the longest of $longest tokens
$data

rewards:
  - function: $reward
    # weight: 1.0            # several rewards are summed with their weights

rollout:
  prompts_per_step: $prompts
  num_generations: 8         # responses to each prompt, compared with each other
  max_completion_length: $most  # tokens; the model's context leaves up to $room

train:
  algorithm: {kind: grpo}
  # learning_rate: $rate   # the default for ${parameters}; with LoRA $lora_rate

$engine$evaluation
checkpoint:
  every: 50                  # steps; Ctrl-C writes one too
"""
)
_ENGINE = """\
engine: {kind: vllm}         # the built-in one does not run this family

"""
_EVAL = Template(
    """\
eval:                        # accuracy on problems that choose nothing
$problems
  every: $every
"""
)


def _text(wishes: Wishes, facts: _Facts) -> str:
    room = facts.card.context - facts.longest
    small = facts.count.total < _LARGE
    prompts = min(_PROMPTS_PER_STEP, len(facts.rows))
    one_pass = -(-len(facts.rows) // prompts)
    evaluation = _EVAL.substitute(
        problems=f"  data:\n    path: {_value(wishes.held_out)}"
        if wishes.held_out
        else f"  fraction: {_FRACTION}            # of the rows above are held out",
        every=max(1, (wishes.steps or one_pass) // 10),
    )
    if not wishes.held_out and len(facts.rows) < _FEW_ROWS:
        evaluation = "".join(f"# {line}\n" for line in evaluation.splitlines())
    return _JOB.substitute(
        output=_value(f"runs/{_name(wishes.data)}"),
        until=f"steps: {wishes.steps}"
        if wishes.steps
        else f"epochs: 1                    # {one_pass} steps, or set steps: N",
        model=_value(wishes.model),
        dtype="float32" if small and not facts.gpus else "bfloat16",
        rows=len(facts.rows),
        longest=facts.longest,
        data="\n".join(f"  {key}: {_value(value)}" for key, value in facts.data.items()),
        reward=_value(wishes.reward),
        prompts=prompts,
        most=min(_SHORT if small else _LONG, room),
        room=room,
        rate=f"{default_learning_rate(facts.count.total, lora=False):g}",
        lora_rate=f"{default_learning_rate(facts.count.total, lora=True):g}",
        parameters=facts.count.words,
        engine="" if facts.card.kind in SUPPORTED else _ENGINE,
        evaluation=evaluation,
    )


def _name(path: str) -> str:
    stem = Path(path.rpartition(":")[2] if ":" in path else path).stem
    return stem or "job"


def _value(value: Any) -> str:
    """Format as YAML, or as JSON, which YAML includes."""
    text = str(value)
    plain = isinstance(value, str) and _reads_as(text, value)
    return text if plain and text and "#" not in text else json.dumps(value, ensure_ascii=False)


def _reads_as(text: str, value: str) -> bool:
    try:
        return yaml.safe_load(f"a: {text}") == {"a": value}
    except yaml.YAMLError:
        return False
