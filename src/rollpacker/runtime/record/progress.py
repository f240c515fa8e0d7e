"""What the user sees of a run: one live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollpacker.runtime.record.metrics import Metrics, numbers
from rollpacker.terminal import Terminal

_BLOCKS = "▁▂▃▄▅▆▇█"
_COLOURS = ("cyan", "magenta", "yellow", "blue", "green", "red")
_KIND_STYLES = {"short": "cyan", "long": "magenta", "full": "blue"}
_REFRESH_HZ = 5
_TREND = 32
_PHASE_BAR = 30
_REPEAT_S = 30.0
_HEAD = "       done    reward     std  length  clip%      loss    grad  step_s     left"
_VERBOSE_HEAD = "   round  bubble%"


class Progress:
    """Shows a run: the same facts in a live view on a terminal and in plain lines elsewhere.

    It counts the steps that are done; a step's number, in warnings and files, is from 0 on.

    The view is drawn by a thread, so what it reads is replaced as a whole, never changed. A
    terminal that has gone, with whoever sat at it, ends no run.

    Args:
        console: where to; standard error by default, so that standard output stays machine-made.
        every: steps for each plain line, where it is no terminal.
        verbose: show how the run is scheduled too: rounds, queue, bubbles, times of phases.
    """

    def __init__(
        self, console: Console | None = None, *, every: int = 1, verbose: bool = False
    ) -> None:
        self._console = console or Terminal(stderr=True)
        self._every = every
        self._verbose = verbose
        self._live: Live | None = None
        self._title = ""
        self._total = 0
        self._done = 0
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
        """The state of the round; call it at every event.

        Args:
            kind: ``full``, ``short`` or ``long``.
            prompts_done: groups that are decided.
            prompts_total: groups that the round needs.
            responses_done: graded.
            responses_started: attempts started so far.
            running: attempts that are being decoded.
            queue: prompts that wait for a long round.
        """
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
        """An evaluation has ``done`` of its ``total`` answers; call it at every event.

        Args:
            kind: ``sampled`` or ``greedy``.
            done: answers that are graded.
            total: answers of the whole evaluation.
        """
        self._evaluating = (kind, done, total)
        self._say_now_and_then("evaluating", f", {done} of {total} ({kind})")

    def _say_now_and_then(self, what: str, more: str) -> None:
        """A line where there is no view, whose words change at every look."""
        now = time.monotonic()
        if self._live is None and now - self._said.get(what, -_REPEAT_S) >= _REPEAT_S:
            self._said[what] = now
            self._print(what + more)

    def evaluated(self, kind: str, result: Mapping[str, float], step: int | None) -> None:
        """An evaluation has ended.

        Args:
            kind: ``sampled`` or ``greedy``.
            result: its ``eval/*`` metrics.
            step: updates that made the weights; None where that is not known.
        """
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
        """Seconds after which a wait is worth a word: 3x the median step, at least 5."""
        return max(5.0, 3 * statistics.median(self._times)) if self._times else 60.0

    def waiting(self, text: str | None) -> None:
        """Name what the run is waiting for (attempt, prompt, worker or reward); None clears it."""
        self._waiting = text
        if text is not None:
            self._say_now_and_then("waiting", f" for {text}")

    def step(self, metrics: Metrics) -> None:
        """A step has ended, with the result of ``step_metrics``."""
        shown = numbers(metrics)
        self._last = shown
        self._done += 1
        self._waiting = None
        if "reward" in shown:
            self._rewards = (*self._rewards, shown["reward"])[-_TREND:]
        self._times = (*self._times, shown.get("step_time", 0.0))[-_TREND:]
        if self._live is None and (self._done % self._every == 0 or self._done == self._total):
            line = _plain_line(f"{self._done}/{self._total}", self._left(), shown)
            if self._verbose:
                line += _verbose_columns(str(metrics.get("tail/round_kind", "")), shown)
            line += _pairs(reward_means(shown))
            if self._verbose:
                line += _pairs(_under(shown, "timing_s/"))
            self._print(line)

    def note(self, text: str) -> None:
        """Print a line that stays."""
        style = "bold yellow" if text.startswith("WARNING") else None
        self._print(text, style)

    def close(self) -> None:
        """Leave the last view on the terminal and stop drawing."""
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()
            self._live = None

    def _print(self, text: str, style: str | None = None) -> None:
        wrap = self._live is None
        with suppress(OSError):
            self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=wrap)

    def _view(self) -> RenderableType:
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(style="dim", no_wrap=True)
        table.add_column(ratio=1)
        for name, what in self._rows():
            table.add_row(name, what)
        parts: list[RenderableType] = [table]
        if waiting := self._waiting:
            parts.append(Text(f"waiting for {waiting}", style="bold yellow"))
        return Panel(
            Group(*parts),
            box=ROUNDED,
            title=Text(f" {self._title} ", style="bold"),
            title_align="left",
            subtitle=self._clock(),
            subtitle_align="right",
            border_style="bright_black",
            width=min(self._console.width, 110),
        )

    def _rows(self) -> list[tuple[str, RenderableType]]:
        count = Text(f"{self._done}/{self._total}")
        rows = [("steps done", _bar(self._done, self._total, count, "green"))]
        if (evaluating := self._evaluating) is not None:
            kind, done, total = evaluating
            rows.append(("evaluating", _bar(done, total, Text(f"{done}/{total} {kind}"), "yellow")))
        elif (state := self._round) is not None:
            rows += self._round_rows(*state)
        if accuracy := self._accuracy:
            parts = [f"{n} {value:.3f} with {at} done" for n, (value, at) in accuracy.items()]
            rows.append(("accuracy", Text(" · ".join(parts))))
        if self._last:
            if self._rewards:
                rows.append(("reward", _trend(self._rewards)))
            if means := reward_means(self._last):
                parts = [f"{name} {value:.3g}" for name, value in means.items()]
                rows.append(("rewards", Text(" · ".join(parts))))
            rows.append(("last step", _facts(self._last)))
            if self._verbose:
                rows.append(("bubbles", _bubbles(self._last)))
                rows.append(("phases", _phases(self._last)))
        return rows

    def _round_rows(
        self, kind: str, done: int, total: int, graded: int, started: int, running: int, queue: int
    ) -> list[tuple[str, RenderableType]]:
        style = _KIND_STYLES.get(kind, "white") if self._verbose else "blue"
        label = Text(f"{done}/{total} ")
        if self._verbose:
            label.append(f"{kind} round", f"bold {style}")
        counts = Text(f"{graded}/{started}  {running} running")
        rows = [
            ("prompts", _bar(done, total, label, style)),
            ("responses", _bar(graded, started, counts, style)),
        ]
        if queue and self._verbose:
            rows.append(("long queue", Text(f"{queue} prompts", "magenta")))
        return rows

    def _left(self) -> str:
        """Time that the rest of the run takes, at the pace of the last steps."""
        return _duration(statistics.median(self._times) * (self._total - self._done))

    def _clock(self) -> Text:
        text = f" {_duration(time.monotonic() - self._began)}"
        if self._times:
            each = statistics.median(self._times)
            text += f" · {each:.3g} s/step · {self._left()} left"
        return Text(text + " ", style="dim")


def _bar(done: int, total: int, label: Text, style: str) -> RenderableType:
    total = max(total, 1)
    bar = ProgressBar(
        total=total,
        completed=min(done, total),
        style="bright_black",
        complete_style=style,
        finished_style=style,
    )
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(ratio=3)
    row.add_column(ratio=2, no_wrap=True)
    row.add_row(bar, label)
    return row


def sparkline(values: Sequence[float]) -> str:
    """One block character per value, the lowest to the highest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in values)


def _trend(rewards: Sequence[float]) -> Text:
    text = Text.assemble((sparkline(rewards), "green"), f"  {rewards[-1]:.3f}")
    if len(rewards) > 1:
        change = rewards[-1] - rewards[0]
        text.append(f"  {change:+.3f} in {len(rewards)} steps", "green" if change > 0 else "dim")
    return text


def _facts(shown: Mapping[str, float]) -> Text:
    text = Text()
    if "completions/mean_length" in shown:  # else nothing was trained on
        clipped = shown["completions/clipped_ratio"]
        text.append(f"length {shown['completions/mean_length']:.0f}")
        text.append(f" · clipped {clipped:.0%}", "bold yellow" if clipped > 0.5 else "")
        text.append(f" · std {shown.get('reward_std', 0):.3f} · ")
    text.append(f"loss {shown.get('loss', 0):.3g} · grad {shown.get('grad_norm', 0):.2g}")
    return text


def _bubbles(shown: Mapping[str, float]) -> Text:
    """Idle share of the workers' time, of the whole step first."""
    return Text(
        " · ".join(f"{name} {share:.0%}" for name, share in _under(shown, "bubble/").items())
    )


def _phases(shown: Mapping[str, float]) -> Text:
    """One bar in proportion, then each phase's name and seconds in its colour."""
    phases = {n: s for n, s in _under(shown, "timing_s/").items() if s > 0}
    total = sum(phases.values())
    ordered = sorted(phases.items(), key=lambda item: -item[1])
    bar, legend = Text(), Text()
    for i, (name, seconds) in enumerate(ordered):
        colour = _COLOURS[i % len(_COLOURS)]
        bar.append("━" * round(_PHASE_BAR * seconds / total), colour)
        legend.append(f"  {name} {seconds:.3g} s", colour)
    return bar + legend


def reward_means(shown: Mapping[str, float]) -> dict[str, float]:
    """The mean of each reward function in a step, by its name."""
    means = _under(shown, "rewards/").items()
    return {name.removesuffix("/mean"): mean for name, mean in means if name.endswith("/mean")}


def _plain_line(step: str, left: str, shown: Mapping[str, float]) -> str:
    def of(name: str, width: int, form: str, scale: float = 1.0) -> str:
        """What there is no number for, as on emulated devices, is a dash."""
        text = f"{scale * shown[name]:{form}}" if name in shown else "–"
        return f"  {text:>{width}}"

    return "".join(
        (
            f"{step:>11}",
            of("reward", 8, ".4f"),
            of("reward_std", 6, ".3f"),
            of("completions/mean_length", 6, ".0f"),
            of("completions/clipped_ratio", 5, ".1f", 100),
            of("loss", 8, ".4f"),
            of("grad_norm", 6, ".3g"),
            of("step_time", 6, ".4g"),
            f"  {left:>7}",
        )
    )


def _verbose_columns(kind: str, shown: Mapping[str, float]) -> str:
    return f"  {kind:>6}  {100 * shown.get('bubble/total', 0.0):7.1f}"


def _pairs(values: Mapping[str, float]) -> str:
    return "".join(f"  {name}={value:.3g}" for name, value in values.items())


def _under(shown: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {n.removeprefix(prefix): v for n, v in shown.items() if n.startswith(prefix)}


def _duration(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
