"""The judge as the graders use it: batches by length, scores in [0, 1]. It needs torch only for a
model of its own. With a ``generate`` callable it asks that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rollpacker.core.types import AttemptId
from rollpacker.policy.grading import JudgePlan
from rollpacker.reward.base import GradeRequest, GradingError
from rollpacker.reward.judge.options import (
    JudgeOptions,
    capped,
    load_template,
    make_parser,
    prompt_text,
)

if TYPE_CHECKING:
    from rollpacker.reward.judge.model import ModelAsker

Generate = Callable[[Sequence[str]], Sequence[str]]
"""Returns one answer for each prompt. ``MemoryError``: they were too many at once."""
Outcome = float | GradingError
_Waiting = list[tuple[AttemptId, list[int]]]
"""Responses with the tokens of their prompts, the shortest first."""

_CUT = "[...] "


class Judge:
    """Grades responses with a language model, or with ``generate`` in its place (mode
    ``generate``). Raises ``ValueError`` for options that cannot be used."""

    def __init__(self, options: JudgeOptions, generate: Generate | None = None) -> None:
        self._options = options
        self._template = load_template(options.template)
        self._asker = _asker(options, generate)

    def grade(self, requests: Sequence[GradeRequest]) -> list[float]:
        """One score each. Raises the first ``GradingError`` after all have been tried."""
        outcomes = self.outcomes(requests)
        errors = [outcome for outcome in outcomes if isinstance(outcome, GradingError)]
        if errors:
            more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            raise GradingError(f"{errors[0]}{more}")
        return [float(outcome) for outcome in outcomes if not isinstance(outcome, GradingError)]

    def outcomes(self, requests: Sequence[GradeRequest]) -> list[Outcome]:
        """For each request, a score or the error in its place."""
        done: dict[AttemptId, Outcome] = {}
        waiting: _Waiting = []
        for request in requests:
            try:
                waiting.append((request.attempt, self._prompt(request)))
            except GradingError as error:
                done[request.attempt] = error
        waiting.sort(key=lambda each: len(each[1]))
        while waiting:
            plan = self._asker.plan([len(prompt) for _, prompt in waiting])
            if plan is None:
                error = GradingError(
                    f"the judge has no memory for a prompt of {len(waiting[0][1])} tokens: give "
                    "the engines less KV, or the judge more memory_gb"
                )
                done |= {attempt: error for attempt, _ in waiting}
                break
            found = self._batch(waiting[: plan.concurrency], plan.resident)
            done |= found
            del waiting[: len(found)]
        return [done[request.attempt] for request in requests]

    def _batch(self, batch: _Waiting, resident: int) -> dict[AttemptId, Outcome]:
        scores: list[float | None] = [None]
        failure = "the judge's answer holds no grade"
        while True:
            try:
                scores = self._asker.ask([prompt for _, prompt in batch], resident)
                break
            except MemoryError as error:
                if len(batch) == 1:
                    failure = f"the judge ran out of memory: {str(error)[:200]}"
                    break
                batch = batch[: (len(batch) + 1) // 2]
        return {
            attempt: GradingError(failure) if score is None else score
            for (attempt, _), score in zip(batch, scores, strict=True)
        }

    def _prompt(self, request: GradeRequest) -> list[int]:
        completion = request.text
        if self._options.after is not None:
            completion = completion.rpartition(self._options.after)[2].strip()
        prompt = self._rendered(request, completion)
        most = self._asker.max_tokens
        while len(prompt) > most:
            cut = self._shorter(completion, len(prompt) - most)
            completion, prompt = cut, self._rendered(request, cut)
        return prompt

    def _rendered(self, request: GradeRequest, completion: str) -> list[int]:
        reference = request.row.get(self._options.reference_key)
        values = {
            "prompt": prompt_text(request.prompt),
            "completion": completion,
            "reference": None if reference is None else str(reference),
        }
        return self._asker.encode(self._template.render(values))

    def _shorter(self, completion: str, excess: int) -> str:
        # Cut about ``excess`` tokens from the beginning: the answer comes at the end.
        tokens = len(self._asker.encode(completion))
        if self._options.overlong == "error" or tokens <= excess:
            raise GradingError(
                f"the judge's prompt is {excess} tokens too long: set max_tokens or overlong: tail"
            )
        text = completion.removeprefix(_CUT)
        kept = int(len(text) * (1.0 - (excess + 2) / tokens))
        if kept < 1:
            raise GradingError("the judge's template leaves no room for the response")
        return _CUT + text[-kept:]


class _CallableAsker:
    def __init__(self, options: JudgeOptions, generate: Generate) -> None:
        self._generate = generate
        self._parse = make_parser(options.parser, options.low, options.high)
        self.max_tokens = options.max_tokens or 1 << 62
        most = JudgePlan(concurrency=options.max_concurrency, resident=0)
        self.plan = capped(lambda _: most, options.batch_tokens)

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def ask(self, prompts: Sequence[list[int]], resident: int) -> list[float | None]:
        del resident  # ``generate`` manages its own memory
        texts = ["".join(map(chr, prompt)) for prompt in prompts]
        answers = self._generate(texts)
        if len(answers) != len(prompts):
            raise GradingError(
                f"the judge's generate returned {len(answers)} answers to {len(prompts)} prompts"
            )
        return [self._parse(answer) for answer in answers]


def _asker(options: JudgeOptions, generate: Generate | None) -> _CallableAsker | ModelAsker:
    if generate is not None:
        if options.mode != "generate":
            raise ValueError("judge: a generate callable gives no logits: set mode: generate")
        return _CallableAsker(options, generate)
    if options.model is None:
        raise ValueError("judge: options.model is missing: a folder or hub name")
    # Imported here, since only a judge with a model of its own needs torch.
    from rollpacker.reward.judge.model import ModelAsker

    return ModelAsker(options, load_template(options.template))
