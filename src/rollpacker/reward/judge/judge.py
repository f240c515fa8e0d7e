"""The judge as the graders use it: a queue, batches by length, scores in [0, 1].

It needs torch only where it runs a model of its own; given a ``generate`` callable it asks that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

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

Generate = Callable[[Sequence[str]], Sequence[str]]
"""Answers to prompts, one each; ``MemoryError`` says that they were too many at once."""
Outcome = float | GradingError

_CUT = "[...] "


class Asker(Protocol):
    """What answers the judge's prompts."""

    max_tokens: int

    def encode(self, text: str) -> list[int]:
        """The prompt's tokens."""
        ...

    def plan(self, lengths: Sequence[int], /) -> JudgePlan | None:
        """How many of the shortest prompts to ask together; None when none fits."""
        ...

    def ask(self, prompts: Sequence[list[int]], resident: int) -> list[float | None]:
        """Scores; None where an answer is no grade. ``MemoryError`` when they are too many."""
        ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    attempt: AttemptId
    prompt: list[int]


class Judge:
    """Grades responses with a language model.

    Args:
        options: see ``JudgeOptions``.
        generate: answers prompts in place of a model of its own (mode ``generate``).

    Raises ``ValueError`` for options that cannot be used.
    """

    def __init__(self, options: JudgeOptions, generate: Generate | None = None) -> None:
        self._options = options
        self._template = load_template(options.template)
        self._asker = _asker(options, generate)
        self._waiting: list[_Waiting] = []
        self._failed: dict[AttemptId, Outcome] = {}

    def grade(self, requests: Sequence[GradeRequest]) -> list[float]:
        """One score each. Raises the first ``GradingError`` after all have been tried."""
        outcomes = self.outcomes(requests)
        errors = [outcome for outcome in outcomes if isinstance(outcome, GradingError)]
        if errors:
            more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            raise GradingError(f"{errors[0]}{more}")
        return [float(outcome) for outcome in outcomes if not isinstance(outcome, GradingError)]

    def outcomes(self, requests: Sequence[GradeRequest]) -> list[Outcome]:
        """A score or the reason why there is none, one each."""
        done: dict[AttemptId, Outcome] = {}
        try:
            self.submit(requests)
            while len(done) < len(requests):
                done |= self.step()
        finally:  # nothing of a call that raised is left to the next one
            self.cancel([request.attempt for request in requests])
        return [done[request.attempt] for request in requests]

    @property
    def pending(self) -> int:
        """Responses that ``step`` has still to say something about."""
        return len(self._waiting) + len(self._failed)

    def submit(self, requests: Sequence[GradeRequest]) -> None:
        """Queue responses; attempts must not be queued already."""
        for request in requests:
            try:
                self._waiting.append(_Waiting(request.attempt, self._prompt(request)))
            except GradingError as error:
                self._failed[request.attempt] = error
        self._waiting.sort(key=lambda waiting: len(waiting.prompt))

    def cancel(self, attempts: Collection[AttemptId]) -> None:
        """Forget queued attempts; unknown ones are ignored."""
        gone = set(attempts)
        self._waiting = [w for w in self._waiting if w.attempt not in gone]
        self._failed = {a: e for a, e in self._failed.items() if a not in gone}

    def step(self) -> dict[AttemptId, Outcome]:
        """Judge one batch, the shortest that wait, and return its outcomes.

        Out of memory, the batch is halved, down to one response.
        """
        done, self._failed = self._failed, {}
        if not self._waiting:
            return done
        plan = self._asker.plan([len(waiting.prompt) for waiting in self._waiting])
        if plan is None:
            return done | self._give_up_all()
        count = plan.concurrency
        while True:
            batch = self._waiting[:count]
            try:
                scores = self._asker.ask([w.prompt for w in batch], plan.resident)
            except MemoryError as error:
                if count > 1:
                    count = (count + 1) // 2
                    continue
                scores = [None]
                failure = f"the judge ran out of memory: {str(error)[:200]}"
            else:
                failure = "the judge's answer holds no grade"
            break
        self._waiting = self._waiting[len(batch) :]
        for waiting, score in zip(batch, scores, strict=True):
            done[waiting.attempt] = GradingError(failure) if score is None else score
        return done

    def _give_up_all(self) -> dict[AttemptId, Outcome]:
        shortest = len(self._waiting[0].prompt)
        error = GradingError(
            f"the judge has no memory for a prompt of {shortest} tokens: give the engines less "
            "KV, or the judge more memory_gb"
        )
        given_up, self._waiting = self._waiting, []
        return {waiting.attempt: error for waiting in given_up}

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
        """Without its beginning, about ``excess`` tokens; the answer comes at the end."""
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
    """Asks a function for text; lengths are in characters, it knows no tokens."""

    def __init__(self, options: JudgeOptions, generate: Generate) -> None:
        self._generate = generate
        self._parse = make_parser(options.parser, options.low, options.high)
        self.max_tokens = options.max_tokens or 1 << 62
        most = JudgePlan(concurrency=options.max_concurrency, resident=0)
        self.plan = capped(lambda _: most, options.batch_tokens)

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def ask(self, prompts: Sequence[list[int]], resident: int) -> list[float | None]:
        del resident  # the function's own business
        texts = ["".join(map(chr, prompt)) for prompt in prompts]
        answers = self._generate(texts)
        if len(answers) != len(prompts):
            raise GradingError(
                f"the judge's generate returned {len(answers)} answers to {len(prompts)} prompts"
            )
        return [self._parse(answer) for answer in answers]


def _asker(options: JudgeOptions, generate: Generate | None) -> Asker:
    if generate is not None:
        if options.mode != "generate":
            raise ValueError("judge: a generate callable gives no logits; set mode: generate")
        return _CallableAsker(options, generate)
    if options.model is None:
        raise ValueError("judge: options.model is missing: a folder or hub name")
    # Here, since only a judge with a model of its own needs torch.
    from rollpacker.reward.judge.model import ModelAsker

    return ModelAsker(options, load_template(options.template))
