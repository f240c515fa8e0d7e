"""The schedule of one step, as compact data that the page draws. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import polars as pl

from rollpacker.report.reading import bubbles
from rollpacker.report.reading.run_folder import RunFolder
from rollpacker.runtime.step.bubble import Span

MAX_BARS = 24_000  # bars in one page. A page with more leaves steps out evenly.
MAX_BARS_PER_STEP = 4_000  # bars of one step. With more, only every k-th lane is drawn.
MAX_WORKERS = 16
"""Workers drawn, the first ones. If replicas are separate, at least a quarter are replicas."""
STATES = ("kept", "aborted", "dropped", "failed", "moved", "carried")
"""The end of a response. ``moved``: kept, and decoded here after a migration. ``carried``:
continues in the next step."""
_PLACES = {state: place for place, state in enumerate(STATES)}
_TIMES = ("start_s", "end_s")


class Gantt:
    """Charts of a run's steps."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self.windows = bubbles.step_windows(run.samples, run.tasks, run.rounds, run.metrics)
        self.stays = bubbles.segments(run.samples, run.moves, run.formed)
        decoding, waiting = bubbles.split(self.stays, run.waits)
        self.bubbles = bubbles.worker_bubbles(
            decoding, run.tasks, self.windows, lambda worker: run.place(worker).devices, waiting
        )
        fractions = bubbles.bubble_fractions(self.bubbles)
        self.shares: dict[int, tuple[float, float]] = {
            step: (rollout, whole) for step, rollout, whole, _ in fractions.iter_rows()
        }
        """Idle shares by step: of the rollout, and of the whole step."""
        self.tools: dict[int, float] = dict(fractions.select("step", "tools_fraction").iter_rows())
        """Share of the rollout in which all responses of a worker waited for environments."""
        self.workers: list[int] = self.bubbles["worker"].unique().sort().to_list()
        self._stays = self.stays.partition_by("step", as_dict=True)
        self._bars: Counter[int] = Counter(decoding["step"]) + Counter(waiting["step"])
        self._samples = run.samples.partition_by("step", as_dict=True)
        self._tasks = run.tasks.partition_by("step", as_dict=True)
        self._waits = run.waits.partition_by("step", as_dict=True)

    def marked(self) -> dict[str, int]:
        """Return the first, the median and the longest step. Empty if no response is known."""
        if not self.windows:
            return {}
        ranked = sorted((end - start, step) for step, (start, _, end) in self.windows.items())
        steps = [step for _, step in ranked]
        return {"first": min(steps), "median": steps[len(steps) // 2], "longest": steps[-1]}

    def chosen(self) -> list[int]:
        """Return the steps to draw: the marked ones and as many others, evenly, as ``MAX_BARS``
        allows."""
        always = set(self.marked().values())
        counts = {s: min(self._bars[s], MAX_BARS_PER_STEP) for s in self.windows}
        others = [step for step in sorted(self.windows) if step not in always]
        left = MAX_BARS - sum(counts[step] for step in always)
        mean = max(1.0, sum(counts[step] for step in others) / max(1, len(others)))
        room = min(len(others), max(0, int(left / mean)))
        picked = {others[i * len(others) // room] for i in range(room)} if room else set()
        return sorted(always | picked)

    def _drawn(self) -> list[int]:
        replicas = [one for one in self.workers if self.run.place(one).kind == "replica"]
        others = [one for one in self.workers if one not in replicas]
        room = max(MAX_WORKERS - len(others), MAX_WORKERS // 4)
        replicas = replicas[:room]
        return [*others[: MAX_WORKERS - len(replicas)], *replicas]

    def chart(self, step: int) -> dict[str, Any]:
        """Return the data of one step. Times are seconds after its start.

        ``bubble`` is the idle share of the step, ``rollout_bubble`` of its rollout, and
        ``tools_bubble`` the part of the latter in which responses waited for environments. A
        worker's ``idle`` and ``tools`` are pairs of start and end. Its ``attempts`` (one for each
        turn) are lane, start, end, index into ``STATES``, tokens, reward, index into ``prompts``,
        sample index. Its ``waits`` are lane, start, end, index into ``prompts``, sample index, and
        its ``tasks`` lane, start, end, kind, prompts.
        """
        start, rollout_end, end = self.windows[step]
        stays, prompts = self._described(step)
        every = -(-self._bars[step] // MAX_BARS_PER_STEP)
        tasks = self._tasks.get((step,), self.run.tasks.clear())
        rows = [self._worker(step, worker, stays, tasks, every) for worker in self._drawn()]
        rollout_bubble, bubble = self.shares[step]
        return {
            "step": step,
            "kind": self._samples[(step,)]["round_kind"][0],
            "end": _ms(end - start),
            "rollout_end": _ms(rollout_end - start),
            "bubble": round(bubble, 4),
            "rollout_bubble": round(rollout_bubble, 4),
            "tools_bubble": round(self.tools[step], 4),
            "prompts": prompts,
            "drawn": sum(row.pop("drawn") for row in rows),
            "workers": rows,
            "workers_total": len(self.workers),
            "attempts_total": len(stays),
        }

    def _described(self, step: int) -> tuple[pl.DataFrame, list[str]]:
        samples = self._samples[(step,)]
        prompts: list[str] = samples["prompt"].unique(maintain_order=True).to_list()
        about = samples.select(
            "attempt",
            pl.col("start_s").alias("began_s"),
            pl.col("state").replace_strict(_PLACES, default=_PLACES["failed"]),
            "tokens",
            "reward",
            pl.col("prompt").replace_strict(prompts, list(range(len(prompts)))),
            "sample_index",
        )
        moved = (pl.col("state") == STATES.index("kept")) & (pl.col("start_s") > pl.col("began_s"))
        state = pl.when(moved).then(STATES.index("moved")).otherwise(pl.col("state"))
        stays = self._stays[(step,)].join(about, on="attempt", how="left", maintain_order="left")
        return stays.with_columns(state.alias("state")), prompts

    def _worker(
        self, step: int, worker: int, stays: pl.DataFrame, tasks: pl.DataFrame, every: int
    ) -> dict[str, Any]:
        start, rollout_end, end = self.windows[step]
        place = self.run.place(worker)
        mine = stays.filter(pl.col("worker") == worker)
        work = tasks.filter(pl.col("worker") == worker)
        lanes, task_lanes = bubbles.lanes(bubbles.spans(mine)), bubbles.lanes(bubbles.spans(work))
        held = mine.with_columns(lane=pl.Series(lanes, dtype=pl.Int64))
        drawn = held.filter(pl.col("lane") % every == 0)
        waits_of_step = self._waits.get((step,), self.run.waits.clear())
        decoding, waiting = bubbles.split(held, waits_of_step)
        busy = bubbles.union([*bubbles.spans(decoding), *bubbles.spans(work)])
        empty, tools = _causes(busy, bubbles.spans(waiting), start, end)
        in_rollout = bubbles.gaps(busy, start, rollout_end)
        about = ("state", "tokens", "reward", "prompt", "sample_index")
        attempts, waits = (
            _rows(part.filter(pl.col("lane") % every == 0).select("lane", *_TIMES, *more), start)
            for part, more in ((decoding, about), (waiting, about[-2:]))
        )
        work = work.with_columns(lane=pl.Series(task_lanes, dtype=pl.Int64))
        return {
            "kind": place.kind,
            "worker": place.number,
            "lanes": max(lanes, default=0) + 1,
            "task_lanes": max(task_lanes, default=0) + 1,
            "bubble": round(bubbles.total(in_rollout) / max(rollout_end - start, 1e-9), 4),
            "idle": [(_ms(a - start), _ms(b - start)) for a, b in empty.tolist()],
            "tools": [(_ms(a - start), _ms(b - start)) for a, b in tools.tolist()],
            "attempts": attempts,
            "waits": waits,
            "tasks": _rows(work.select("lane", *_TIMES, "kind", "prompts"), start),
            "drawn": drawn.height,
        }


def _causes(
    busy: bubbles.Intervals, waiting: Sequence[Span], start: float, end: float
) -> tuple[bubbles.Intervals, bubbles.Intervals]:
    empty = bubbles.gaps(bubbles.union([*busy.tolist(), *waiting]), start, end)
    tools = bubbles.gaps(bubbles.union([*busy.tolist(), *empty.tolist()]), start, end)
    return empty, tools


def _rows(frame: pl.DataFrame, start: float) -> list[tuple[Any, ...]]:
    return [(lane, _ms(a - start), _ms(b - start), *rest) for lane, a, b, *rest in frame.rows()]


def _ms(seconds: float) -> float:
    """Round seconds to 0.1 ms: a finer time is not visible and costs bytes."""
    return round(seconds, 4)
