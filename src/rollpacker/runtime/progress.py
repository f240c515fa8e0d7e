"""What the user sees of a run: one live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollpacker.runtime.metrics import Metrics, numbers

_BLOCKS = "▁▂▃▄▅▆▇█"
_COLOURS = ("cyan", "magenta", "yellow", "blue", "green", "red")
_KIND_STYLES = {"short": "cyan", "long": "magenta", "full": "blue"}
_REFRESH_HZ = 5
_TREND = 32
_PHASE_BAR = 30
_REPEAT_S = 30.0
_HEAD = "step   round    reward     std  length  clip%      loss    grad  step_s  bubble%  phases"


class Progress:
    """Shows a run. Every call but ``step`` and ``note`` only stores what the view draws next.

    The view is drawn by a thread, so what it reads is replaced as a whole, never changed.

    Args:
        console: where to; standard error by default, so that standard output stays machine-made.
        every: steps for each plain line, where it is no terminal.
    """

    def __init__(self, console: Console | None = None, *, every: int = 1) -> None:
        self._console = console or Console(stderr=True)
        self._every = every
        self._live: Live | None = None
        self._title = ""
        self._total = 0
        self._done = 0
        self._began = time.monotonic()
        self._round: tuple[str, int, int, int, int, int, int] | None = None
        self._waiting: str | None = None
        self._said = ("", -_REPEAT_S)
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
            self._live.start(refresh=True)
        else:
            resumed = f", resumed after step {done}" if done else ""
            self._print(f"{title}: {total_steps} steps{resumed}")
            self._print(_HEAD)

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

    def patience(self) -> float:
        """Seconds after which a wait is worth a word: 3x the median step, at least 5."""
        return max(5.0, 3 * statistics.median(self._times)) if self._times else 60.0

    def waiting(self, text: str | None) -> None:
        """Name what the run is waiting for (attempt, prompt, worker or reward); None clears it."""
        self._waiting = text
        if text is None or self._live is not None:
            return
        now = time.monotonic()
        if text != self._said[0] or now - self._said[1] >= _REPEAT_S:
            self._said = (text, now)
            self._print(f"waiting for {text}")

    def step(self, metrics: Metrics) -> None:
        """A step has ended, with the result of ``step_metrics``."""
        shown = numbers(metrics)
        self._last = shown
        self._done += 1
        self._waiting = None
        self._rewards = (*self._rewards, shown.get("reward", 0.0))[-_TREND:]
        self._times = (*self._times, shown.get("step_time", 0.0))[-_TREND:]
        if self._live is None and (self._done % self._every == 0 or self._done == self._total):
            kind = str(metrics.get("tail/round_kind", ""))
            self._print(_plain_line(int(shown["step"]), kind, shown))

    def note(self, text: str) -> None:
        """Print a line that stays."""
        style = "bold yellow" if text.startswith("WARNING") else None
        self._print(text, style)

    def close(self) -> None:
        """Leave the last view on the terminal and stop drawing."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(
            text, style=style, markup=False, highlight=False, soft_wrap=self._live is None
        )

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
        doing = min(self._done + 1, self._total)
        rows = [("step", _bar(self._done, self._total, Text(f"{doing}/{self._total}"), "green"))]
        if (state := self._round) is not None:
            kind, done, total, graded, started, running, queue = state
            style = _KIND_STYLES.get(kind, "white")
            label = Text.assemble(f"{done}/{total} ", (f"{kind} round", f"bold {style}"))
            rows.append(("prompts", _bar(done, total, label, style)))
            counts = Text(f"{graded}/{started}  {running} running")
            rows.append(("responses", _bar(graded, started, counts, style)))
            if queue:
                rows.append(("long queue", Text(f"{queue} prompts", "magenta")))
        if self._last:
            rows.append(("reward", _trend(self._rewards)))
            rows.append(("last step", _facts(self._last)))
            rows.append(("phases", _phases(self._last)))
        return rows

    def _clock(self) -> Text:
        text = f" {_duration(time.monotonic() - self._began)}"
        if self._times:
            each = statistics.median(self._times)
            left = each * (self._total - self._done)
            text += f" · {each:.3g} s/step · {_duration(left)} left"
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
    text = Text(f"length {shown.get('completions/mean_length', 0):.0f}")
    clipped = shown.get("completions/clipped_ratio", 0)
    text.append(f" · clipped {clipped:.0%}", "bold yellow" if clipped > 0.5 else "")
    text.append(f" · loss {shown.get('loss', 0):.3g} · grad {shown.get('grad_norm', 0):.2g}")
    for name, share in _under(shown, "bubble/").items():
        text.append(f" · {'bubble' if name == 'total' else f'bubble {name}'} {share:.0%}")
    return text


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


def _plain_line(step: int, kind: str, shown: Mapping[str, float]) -> str:
    def of(name: str) -> float:
        return shown.get(name, 0.0)

    phases = " ".join(f"{n}={s:.3g}" for n, s in _under(shown, "timing_s/").items())
    return (
        f"{step:>4}  {kind:>6}  {of('reward'):8.4f}  {of('reward_std'):6.3f}"
        f"  {of('completions/mean_length'):6.0f}  {100 * of('completions/clipped_ratio'):5.1f}"
        f"  {of('loss'):8.4f}  {of('grad_norm'):6.3g}  {of('step_time'):6.4g}"
        f"  {100 * of('bubble/total'):7.1f}  {phases}"
    )


def _under(shown: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {n.removeprefix(prefix): v for n, v in shown.items() if n.startswith(prefix)}


def _duration(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
