"""Keys of the records in which trainers log responses, one layout per trainer.

A path leads through objects by keys, and through each entry of a list. Tokens are counted by
``count:PATH`` (a number) or ``ids:PATH`` (a list with one entry per token). Or by ``mask:PATH`` (a
list that is true at sampled tokens) or ``padded:PATH`` (tokens as texts, with padding at the end).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from rollpacker.polytrace.formats.logs.texts import REASONING


@dataclass(frozen=True, kw_only=True)
class LogLayout:
    """One trainer's layout. If there are several paths, the first that exists counts.

    Args:
        lists: a record has at least one of these keys, with a list.
        prompt: paths of the prompt. The prompt's id is made of it.
        conversation: path of prompt and response in one: messages, or texts that alternate.
        tokens: ways to count the sampled tokens, before those for all trainers.
        prefix: paths of token ids and of their mask. The prompt ends where the mask begins.
        reward: paths of the score. A list is summed.
        stepless: without a step in record or names, all are of step 0, and a note is logged.
        numbers: a bare number in a file's name is a step, without the word.
        stop: path of the finish reason. The last one counts.
        unique: path of the response's own id. A repeated id counts once.
        group: paths of the id that a prompt has within its step.
        shape: ``rows`` has one response per record, ``columns`` a list for each key, ``singles``
            lists of one. Otherwise it is the path of the responses within the record.
        relogged: files with the same responses of different steps are copies. Without a score, the
            reward is a sum of columns (``rewards``).
    """

    title: str
    files: str
    needs: tuple[str, ...]
    lists: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    prompt: tuple[str, ...] = ()
    response: tuple[str, ...] = ()
    conversation: str = ""
    tokens: tuple[str, ...] = ()
    prompt_tokens: tuple[str, ...] = ()
    prefix: tuple[str, str] | None = None
    reward: tuple[str, ...] = ()
    step: tuple[str, ...] = ()
    stepless: bool = False
    numbers: bool = False
    domain: tuple[str, ...] = ()
    stop: str = ""
    rank: str = ""
    unique: str = ""
    group: tuple[str, ...] = ("uid", "group_id", "group_index")
    shape: Literal["rows", "columns", "singles", "traces"] = "rows"
    relogged: bool = False
    approximated: str = "lengths, by characters"

    def fits(self, record: Mapping[str, Any]) -> bool:
        return (
            all(key in record for key in self.needs)
            and not any(key in record for key in self.lacks)
            and (not self.lists or any(isinstance(record.get(key), list) for key in self.lists))
        )

    @property
    def said(self) -> str:
        """The key that a message about a missing text names."""
        return self.conversation or (*self.response, *self.needs)[0]

    @cached_property
    def used(self) -> frozenset[str]:
        """Keys that need not be kept once a record is read."""
        ways = (way.partition(":")[2] for way in (*self.tokens, *self.prompt_tokens))
        paths = (*self.prompt, *self.response, self.conversation, *ways, *(self.prefix or ()))
        rest = (*self.reward, *self.step, self.rank, self.unique, *self.group, REASONING)
        return frozenset(path.partition(".")[0] for path in (*paths, *rest))


_SUM = "lengths, by characters of what the assistant said; the reward is a plain sum of columns"
_MASKED = "nothing, where token_loss_mask is logged; else lengths, by characters"

LAYOUTS: dict[str, LogLayout] = {
    "verl": LogLayout(
        title="verl's rollout dumps",
        files="`trainer.rollout_data_dir`: `STEP.jsonl`",
        needs=("input", "output"),
        prompt=("input",),
        response=("output",),
        reward=("score", "reward"),
        step=("step",),
        numbers=True,
        domain=("data_source",),
    ),
    "openrlhf": LogLayout(
        title="OpenRLHF's batch inference",
        files="`--output_path`: `*.jsonl`",
        needs=("input", "output", "reward"),
        lacks=("score", "step", "gts"),
        prompt=("input",),
        response=("output",),
        reward=("reward",),
        stepless=True,
        approximated="lengths, by characters; without a step in the file's name all are of step 0",
    ),
    "trl": LogLayout(
        title="TRL's completions",
        files="`log_completions`: `completions_STEP.parquet`, or its tables in wandb: "
        "`*.table.json`",
        needs=("step", "prompt", "completion"),
        prompt=("prompt",),
        response=("completion",),
        reward=("reward",),
        step=("step",),
        relogged=True,
        approximated=_SUM,
    ),
    "swift": LogLayout(
        title="ms-swift's completions",
        files="`log_completions`: `completions.jsonl`, a line a step",
        needs=("completion", "prompt"),
        lists=("gen_step", "step"),
        prompt=("prompt",),
        response=("completion",),
        reward=("reward",),
        step=("gen_step", "step"),
        stop="truncated",
        shape="columns",
        relogged=True,
        approximated=_SUM,
    ),
    "skyrl": LogLayout(
        title="SkyRL's dumped evaluations",
        files="`dumped_evals/global_step_N_evals/*.jsonl`",
        needs=("input_prompt", "output_response"),
        prompt=("input_prompt",),
        response=("output_response",),
        reward=("score",),
        stepless=True,
        domain=("data_source",),
        stop="stop_reason",
        approximated="lengths, by characters; without a step in a folder's name all are of step 0",
    ),
    "roll": LogLayout(
        title="ROLL's rollout dumps",
        files="`rollout_dump_dir`: `rollout_dump_data.step_N.jsonl`",
        needs=("responses", "scores"),
        prompt=("prompt", "messages", "id"),
        response=("responses",),
        reward=("scores",),
        step=("global_step",),
        domain=("domain",),
        group=("id",),
        shape="columns",
    ),
    "roll_board": LogLayout(
        title="ROLL's logging board",
        files="`save_logging_board_dir`: `data_*.jsonl`",
        needs=("prompt", "response", "response_tokens"),
        prompt=("prompt",),
        response=("response",),
        tokens=("mask:new_response_mask", "padded:response_tokens"),
        reward=("reward",),
        step=("step",),
        approximated="prompt lengths, by characters",
    ),
    "prime": LogLayout(
        title="prime-rl's episodes",
        files="`rollouts/step_N/{train,eval}/all/traces.jsonl`",
        needs=("traces", "task"),
        prompt=("task.key", "task.hash", "task.data", "task"),
        response=("sampled",),
        tokens=("mask:nodes.mask", "count:calls.usage.completion_tokens"),
        prompt_tokens=("first:calls.usage.prompt_tokens",),
        reward=("rewards",),
        step=("run.work.step",),
        stepless=True,
        domain=("env.name", "env.id"),
        stop="calls.finish_reason",
        unique="id",
        shape="traces",
        approximated="prompt lengths, by characters",
    ),
    "prime_rollouts": LogLayout(
        title="prime-rl's rollouts",
        files="`rollouts/step_N/{train,eval}/all/traces.jsonl` of older releases",
        needs=("trajectory", "task"),
        prompt=("task.prompt", "prompt", "task"),
        response=("trajectory.completion",),
        tokens=("mask:trajectory.tokens.completion_mask", "ids:trajectory.tokens.completion_ids"),
        prompt_tokens=("first:trajectory.tokens.prompt_ids",),
        reward=("reward",),
        stepless=True,
        approximated="nothing, where token ids are logged",
    ),
    "prime_tokens": LogLayout(
        title="prime-rl's token exports",
        files="`enable_token_export`: `token_exports/step_N/rank_R.jsonl`",
        needs=("token_ids", "loss_mask"),
        prefix=("token_ids", "loss_mask"),
        tokens=("mask:loss_mask",),
        step=("step",),
        domain=("env_name",),
        rank="rank",
        stepless=True,
        approximated="nothing; a prompt's id is made of its token ids, and there are no rewards",
    ),
    "nemo": LogLayout(
        title="NeMo RL's training data",
        files="`train_data_stepN.jsonl`, `val_data_stepN.jsonl`",
        needs=("content", "rewards"),
        conversation="content",
        tokens=("mask:token_loss_mask",),
        reward=("rewards",),
        shape="singles",
        approximated=_MASKED,
    ),
    "slime": LogLayout(
        title="slime's samples",
        files="`--save-debug-rollout-data`, its samples as lines of JSON: `ROLLOUT_ID.jsonl`",
        needs=("prompt", "response", "response_length"),
        prompt=("prompt",),
        response=("response",),
        tokens=("mask:loss_mask", "count:response_length"),
        reward=("reward",),
        step=("rollout_id", "step"),
        numbers=True,
        stop="status",
        approximated="prompt lengths, by characters",
    ),
}

COMPANIONS = frozenset({"aggregated_results.jsonl", "metrics.jsonl"})
"""Files that trainers write beside these, without responses."""


def layout_of(record: Mapping[str, Any]) -> str | None:
    """Return the layout of a record, or None. A layout with more keys takes precedence."""
    fitting = [name for name, layout in LAYOUTS.items() if layout.fits(record)]
    return max(
        fitting,
        key=lambda name: sum(
            len(keys) for keys in (LAYOUTS[name].needs, LAYOUTS[name].lists, LAYOUTS[name].lacks)
        ),
        default=None,
    )
