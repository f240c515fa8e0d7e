"""A run's display: one live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollpacker.runtime.attempts.attempts import DECODING, TrajectoryStage
from rollpacker.runtime.ipc.clock import Clock
from rollpacker.runtime.record.metrics import Metrics, numbers
from rollpacker.terminal import Terminal

if TYPE_CHECKING:
    from rollpacker.runtime.step.step import StepRecord

_REFRESH_HZ = 5
_EVERY_S = 0.2
_TREND = 32
"""The number of steps behind the view's times and rewards."""
_REPEAT_S = 30.0
_WIDEST = 110
_HEAD = "       done    reward     std  length  clip%      loss    grad  step_s     left"
_COLUMNS = (
    ("reward", 8, ".4f", 1),
    ("reward_std", 6, ".3f", 1),
    ("completions/mean_length", 6, ".0f", 1),
    ("completions/clipped_ratio", 5, ".1f", 100),
    ("loss", 8, ".4f", 1),
    ("grad_norm", 6, ".3g", 1),
    ("step_time", 6, ".4g", 1),
)
"""Columns of a plain line: metric, width, format and factor."""
_VERBOSE_HEAD = "   round  bubble%"
_Bar = tuple[int, int] | None
_Row = tuple[str, _Bar, str]
"""A name, the done and total counts, and words."""


class Progress:
    """Shows a run: the same facts in a live view on a terminal and in plain lines elsewhere.

    It counts the steps that are done. Numbers of steps in warnings and files begin at 0. A thread
    draws the view, so its data is replaced as a whole, never changed. A run goes on if its terminal
    is gone.

    Args:
        console: the output, standard error by default, as standard output is for machines.
        every: steps for each plain line.
        verbose: also show scheduling: rounds, queue, bubbles, times of phases.
    """

    def __init__(
        self, console: Console | None = None, *, every: int = 1, verbose: bool = False
    ) -> None:
        self._console = console or Terminal(stderr=True)
        self._every = every
        self._verbose = verbose
        self._live: Live | None = None
        self._title = ""
        self._total = self._done = 0
        self._began = time.monotonic()
        self._round: tuple[str, int, int, int, int, int, int] | None = None
        self._waiting: str | None = None
        self._said: dict[str, float] = {}
        self._evaluating: tuple[str, int, int] | None = None
        self._accuracy: dict[str, tuple[float, int]] = {}
        self._last: dict[str, float] = {}
        self._rewards: tuple[float, ...] = ()
        self._times: tuple[float, ...] = ()

    def start(self, title: str, total_steps: int, done: int = 0) -> None:
        """Begin to show a run of ``total_steps``, of which ``done`` were made before a resume."""
        self._title, self._total, self._done = title, total_steps, done
        self._began = time.monotonic()
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._view,
                console=self._console,
                refresh_per_second=_REFRESH_HZ,
                vertical_overflow="crop",
            )
            with suppress(OSError):
                self._live.start(refresh=True)
        else:
            resumed = f", {done} of them done before" if done else ""
            self._print(f"{title}: {total_steps} steps{resumed}")
            more = f"{_VERBOSE_HEAD}  rewards, phases" if self._verbose else "  rewards"
            self._print(_HEAD + more)

    def round(
        self,
        kind: str,
        prompts_done: int,
        prompts_total: int,
        responses_done: int,
        responses_started: int,
        running: int,
        queue: int,
    ) -> None:
        """Show decided groups, graded responses, decoding attempts, and waiting prompts."""
        self._round = (
            kind,
            prompts_done,
            prompts_total,
            responses_done,
            responses_started,
            running,
            queue,
        )

    def evaluating(self, kind: str, done: int, total: int) -> None:
        self._evaluating = (kind, done, total)
        self._say_now_and_then("evaluating", f", {done} of {total} ({kind})")

    def _say_now_and_then(self, what: str, more: str) -> None:
        """Print a plain line with changing words, at most every 30 seconds."""
        now = time.monotonic()
        if self._live is None and now - self._said.get(what, -_REPEAT_S) >= _REPEAT_S:
            self._said[what] = now
            self._print(what + more)

    def evaluated(self, kind: str, result: Mapping[str, float], step: int | None) -> None:
        """Show an ended evaluation. ``step`` updates made the weights, if that is known."""
        self._evaluating = None
        now = result[f"eval/{kind}_accuracy"]
        before = self._accuracy.get(kind)
        if step is not None:
            self._accuracy = {**self._accuracy, kind: (now, step)}
        after = "" if step is None else f" with {step} done"
        change = "" if before is None else f", {now - before[0]:+.3f} on that with {before[1]}"
        self._print(
            f"accuracy {now:.3f}{after} ({kind}{change}; "
            f"{result['eval/problems']:.0f} problems, "
            f"mean length {result[f'eval/{kind}_mean_length']:.0f})"
        )

    def patience(self) -> float:
        """Seconds after which a wait is shown: three times the median step, at least 5."""
        return max(5.0, 3 * statistics.median(self._times)) if self._times else 60.0

    def waiting(self, text: str | None) -> None:
        self._waiting = text
        if text is not None:
            self._say_now_and_then("waiting", f" for {text}")

    def step(self, metrics: Metrics) -> None:
        shown = numbers(metrics)
        self._last = shown
        self._done += 1
        self._waiting = None
        if "reward" in shown:
            self._rewards = (*self._rewards, shown["reward"])[-_TREND:]
        self._times = (*self._times, shown.get("step_time", 0.0))[-_TREND:]
        if self._live is None and (self._done % self._every == 0 or self._done == self._total):
            self._print(self._line(shown, str(metrics.get("tail/round_kind", ""))))

    def _line(self, shown: Mapping[str, float], kind: str) -> str:
        cells = [f"{self._done}/{self._total}".rjust(11)]
        for name, width, form, unit in _COLUMNS:
            text = f"{unit * shown[name]:{form}}" if name in shown else "–"
            cells.append(text.rjust(width))
        cells.append(self._left().rjust(7))
        if self._verbose:
            cells += [kind.rjust(6), f"{100 * shown.get('bubble/total', 0.0):7.1f}"]
        pairs = _reward_means(shown) | (_under(shown, "timing_s/") if self._verbose else {})
        return "  ".join([*cells, *(f"{name}={value:.3g}" for name, value in pairs.items())])

    def note(self, text: str) -> None:
        self._print(text, "bold yellow" if text.startswith("WARNING") else None)

    def close(self) -> None:
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()
            self._live = None

    def _print(self, text: str, style: str | None = None) -> None:
        wrap = self._live is None
        with suppress(OSError):
            self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=wrap)

    def _view(self) -> Panel:
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(style="dim", no_wrap=True)
        table.add_column(ratio=1)
        for name, bar, words in self._rows():
            cell: Text | Table = Text(words)
            if bar is not None:
                done, total = bar
                cell = Table.grid(padding=(0, 2), expand=True)
                cell.add_column(ratio=3)
                cell.add_column(ratio=2, no_wrap=True)
                cell.add_row(ProgressBar(max(total, 1), min(done, total)), words)
            table.add_row(name, cell)
        waiting = self._waiting
        more = [Text(f"waiting for {waiting}", style="bold yellow")] if waiting else []
        pace = ""
        if self._times:
            pace = f" · {statistics.median(self._times):.3g} s/step · {self._left()} left"
        return Panel(
            Group(table, *more),
            title=Text(f" {self._title} ", style="bold"),
            title_align="left",
            subtitle=Text(f" {_duration(time.monotonic() - self._began)}{pace} ", style="dim"),
            subtitle_align="right",
            border_style="bright_black",
            width=min(self._console.width, _WIDEST),
        )

    def _rows(self) -> list[_Row]:
        rows: list[_Row] = [
            ("steps done", (self._done, self._total), f"{self._done}/{self._total}")
        ]
        if (evaluating := self._evaluating) is not None:
            kind, done, total = evaluating
            rows.append(("evaluating", (done, total), f"{done}/{total} {kind}"))
        elif (state := self._round) is not None:
            kind, done, total, graded, started, running, queue = state
            label = f" {kind} round" if self._verbose else ""
            rows.append(("prompts", (done, total), f"{done}/{total}{label}"))
            rows.append(("responses", (graded, started), f"{graded}/{started}  {running} running"))
            if queue and self._verbose:
                rows.append(("long queue", None, f"{queue} prompts"))
        if accuracy := self._accuracy:
            parts = [f"{n} {value:.3f} with {at} done" for n, (value, at) in accuracy.items()]
            rows.append(("accuracy", None, " · ".join(parts)))
        return rows + (self._last_step(self._last, self._rewards) if self._last else [])

    def _last_step(self, shown: Mapping[str, float], rewards: tuple[float, ...]) -> list[_Row]:
        rows: list[_Row] = []
        if rewards:
            change = f"  {rewards[-1] - rewards[0]:+.3f} in {len(rewards)} steps"
            rows.append(("reward", None, f"{rewards[-1]:.3f}{change if len(rewards) > 1 else ''}"))
        if means := _reward_means(shown):
            rows.append(("rewards", None, _facts(means, "{} {:.3g}")))
        facts = f"loss {shown.get('loss', 0):.3g} · grad {shown.get('grad_norm', 0):.2g}"
        if "completions/mean_length" in shown:  # else nothing was trained on
            facts = (
                f"length {shown['completions/mean_length']:.0f} · "
                f"clipped {shown['completions/clipped_ratio']:.0%} · "
                f"std {shown.get('reward_std', 0):.3f} · {facts}"
            )
        rows.append(("last step", None, facts))
        if self._verbose:
            rows.append(("bubbles", None, _facts(_under(shown, "bubble/"), "{} {:.0%}")))
            phases = sorted(_under(shown, "timing_s/").items(), key=lambda item: -item[1])
            longest = {name: seconds for name, seconds in phases if seconds > 0}
            rows.append(("phases", None, _facts(longest, "{} {:.3g} s")))
        return rows

    def _left(self) -> str:
        return _duration(statistics.median(self._times) * (self._total - self._done))


def _facts(values: Mapping[str, float], form: str) -> str:
    return " · ".join(form.format(name, value) for name, value in values.items())


def _reward_means(shown: Mapping[str, float]) -> dict[str, float]:
    means = _under(shown, "rewards/").items()
    return {name.removesuffix("/mean"): mean for name, mean in means if name.endswith("/mean")}


def _under(shown: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {n.removeprefix(prefix): v for n, v in shown.items() if n.startswith(prefix)}


def _duration(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class Watch:
    """Shows the current round. Polling costs less than a call at every event."""

    def __init__(
        self,
        progress: Progress,
        *,
        record: Callable[[], StepRecord],
        queue: Callable[[], int],
        prompts: int,
        clock: Clock,
        trouble: Callable[[], str | None],
    ) -> None:
        self._progress = progress
        self._record = record
        self._queue = queue
        self._prompts = prompts
        self._clock = clock
        self._trouble = trouble

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            record = self._record()
            if record.end_s:
                continue
            stages = Counter(attempt.stage for attempt in record.attempts.values())
            self._progress.round(
                record.kind.value,
                len(record.trained) + len(record.dropped),
                self._prompts,
                stages[TrajectoryStage.GRADED],
                len(record.attempts),
                sum(stages[stage] for stage in DECODING),
                self._queue(),
            )
            late = self._clock() - record.start_s > self._progress.patience()
            waiting = [pending(record) if late else None, self._trouble()]
            self._progress.waiting(", and ".join(filter(None, waiting)) or None)


_DOING = (
    (DECODING, "response"),
    ((TrajectoryStage.ACTING,), "environment"),
    ((TrajectoryStage.GRADING,), "reward"),
)


def pending(record: StepRecord) -> str:
    """The awaited work of a step in words, the oldest of each kind by name."""
    attempts = list(record.attempts.values())
    parts: list[str] = []
    for stages, doing in _DOING:
        waiting = [attempt for attempt in attempts if attempt.stage in stages]
        if waiting:
            first = min(waiting, key=lambda attempt: attempt.id)
            more = f" and {len(waiting) - 1} more" if len(waiting) > 1 else ""
            parts.append(
                f"the {doing} of attempt {first.id} (prompt {first.prompt}, "
                f"worker {first.engine}){more}"
            )
    return ", ".join(parts) or "gradients and the update"
