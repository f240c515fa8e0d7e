"""Makes run folders as a real run leaves them: a small event-driven round on two workers.

Decoding gets slower with more sequences, lengths have a heavy tail, groups are graded as they
finish. ``exact`` moves the tail to worker 0 and streams gradients on worker 1; ``race`` keeps the
first to finish, aborts the others and re-runs the losers in long rounds; ``off`` waits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import yaml

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.journal import JournalWriter
from rollpacker.core.sample_table import REQUIRED
from rollpacker.core.types import AttemptId, EngineId, Prompt, PromptId, RoundKind

MODES = ("off", "exact", "race")
P0, R0, CAP = 16, 8, 600
GRADE_S, GRADIENT_S, APPLY_S, SYNC_S = 0.0008, 0.016, 0.012, 0.003


@dataclass
class Attempt:
    id: int
    prompt: str
    index: int
    worker: int
    length: int
    start: float
    done: float = 0.0
    row: dict[str, Any] = field(default_factory=dict)


def latency_s(active: int) -> float:
    """One decode step of ``active`` sequences, in the shape of a CPU core."""
    return 0.0007 + 0.00006 * active


class Maker:
    def __init__(self, folder: Path, mode: str, seed: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.mode, self.seed = folder, mode, seed
        self.now, self.next_attempt, self.next_prompt = 0.0, 0, 0
        self.queue: list[str] = []
        self.rows: list[dict[str, Any]] = []
        self.tasks: list[dict[str, Any]] = []
        self.metrics: list[dict[str, Any]] = []
        self.journal = JournalWriter(folder / "journal.jsonl")
        self.journal.meta({"settings": {}, "state": {}})

    def record(self, event: ev.Event, *made: do.Decision) -> None:
        self.journal.record(self.now, event, made)

    def length(self, prompt: str, index: int, step: int) -> int:
        rng = np.random.default_rng([self.seed, int(prompt[1:]), index, step])
        return int(min(CAP, 3 + rng.lognormal(4.2 - 0.02 * step, 0.75)))

    def step(self, step: int) -> None:
        begin = self.now
        racing = self.mode == "race"
        kind = RoundKind.FULL
        if racing:
            kind = RoundKind.LONG if len(self.queue) >= P0 else RoundKind.SHORT
        short = kind is RoundKind.SHORT
        prompts, responses = (P0 * 5 // 4, R0 * 5 // 4) if short else (P0, R0)
        chosen = self.queue[:P0] if kind is RoundKind.LONG else self.draw(prompts)
        self.queue = self.queue[P0:] if kind is RoundKind.LONG else self.queue
        attempts = self.start(step, kind, chosen, responses)
        groups, idle = self.rollout(step, kind, chosen, attempts)
        rollout_end = self.now
        self.update(step, groups)
        mine = [row for row in self.rows if row["step"] == step]
        self.metrics.append(self.measure(step, kind, begin, rollout_end, idle, mine))

    def draw(self, count: int) -> list[str]:
        first = self.next_prompt
        self.next_prompt += count
        return [f"p{i:04d}" for i in range(first, first + count)]

    def start(self, step: int, kind: RoundKind, chosen: list[str], responses: int) -> list[Attempt]:
        workers = (EngineId(0), EngineId(1))
        started = ev.StepStarted(step=step, engines=workers, replicas=(), remaining={"gcd": 1000})
        self.record(started, do.DrawPrompts(counts={"gcd": len(chosen)}))
        attempts: list[Attempt] = []
        for i, prompt in enumerate(chosen):
            for index in range(responses):
                length = self.length(prompt, index, step)
                attempts.append(Attempt(self.next_attempt, prompt, index, i % 2, length, self.now))
                self.next_attempt += 1
        starts = [
            do.StartAttempt(
                attempt=AttemptId(a.id),
                prompt=PromptId(a.prompt),
                index=a.index,
                engine=EngineId(a.worker),
            )
            for a in attempts
        ]
        drawn = tuple(Prompt(id=PromptId(p), domain="gcd", tokens=12) for p in chosen)
        event = ev.PromptsDrawn(prompts=drawn)
        self.record(event, do.BeginRound(step=step, round=kind), *starts)
        return attempts

    def rollout(
        self, step: int, kind: RoundKind, chosen: list[str], attempts: list[Attempt]
    ) -> tuple[list[str], dict[int, float]]:
        running, graded = list(attempts), {p: [] for p in chosen}
        complete: list[str] = []
        idle = {0: 0.0, 1: 0.0}
        free_at = float("inf")
        while running and len(complete) < P0:
            finished = self.advance(running, idle, busy=free_at)
            running.remove(finished)
            self.finish(step, kind, finished, graded)
            losers: list[Attempt] = []
            if len(graded[finished.prompt]) == R0 and finished.prompt not in complete:
                complete.append(finished.prompt)
                losers = [a for a in running if a.prompt == finished.prompt]
            if len(complete) == P0:
                losers = list(running)
            for a in losers:
                running.remove(a)
                self.end(step, kind, a, "abort", "aborted", None)
                self.record(ev.AttemptAborted(attempt=AttemptId(a.id), tokens=int(a.done)))
            if self.mode == "exact" and free_at == float("inf") and len(running) <= 24:
                free_at = self.consolidate(running)
            if self.mode == "exact":
                free_at = self.stream(step, complete, free_at)
        self.lose(step, graded, complete)
        made = do.FinishRollout(step=step, round=kind)
        self.record(ev.AttemptGraded(attempt=AttemptId(self.next_attempt), reward=0.0), made)
        return complete, idle

    def advance(self, running: list[Attempt], idle: dict[int, float], busy: float) -> Attempt:
        speed = {w: 1 / latency_s(sum(a.worker == w for a in running)) for w in (0, 1)}
        nearest = min(running, key=lambda a: (a.length - a.done) / speed[a.worker])
        passed = (nearest.length - nearest.done) / speed[nearest.worker]
        for w in (0, 1):
            if not any(a.worker == w for a in running):
                covered = 0.0 if busy == float("inf") else max(0.0, busy - self.now)
                idle[w] += max(0.0, passed - covered)
        for a in running:
            a.done = a.length if a is nearest else a.done + passed * speed[a.worker]
        self.now += passed
        return nearest

    def finish(
        self, step: int, kind: RoundKind, a: Attempt, graded: dict[str, list[Attempt]]
    ) -> None:
        rng = np.random.default_rng([self.seed, a.id, 7])
        truncated = a.length >= CAP
        reward = float(not truncated and rng.random() < 0.5 + 0.03 * step)
        reason = "length" if truncated else "stop"
        kept = len(graded[a.prompt]) < R0
        graded[a.prompt].append(a)
        self.end(step, kind, a, reason, "kept" if kept else "aborted", reward)
        event = ev.AttemptFinished(attempt=AttemptId(a.id), tokens=a.length, finish_reason=reason)
        self.record(event, do.GradeAttempt(attempt=AttemptId(a.id)))
        now, self.now = self.now, self.now + GRADE_S
        self.record(ev.AttemptGraded(attempt=AttemptId(a.id), reward=reward))
        self.now = now

    def end(
        self,
        step: int,
        kind: RoundKind,
        a: Attempt,
        reason: str,
        state: str,
        reward: float | None,
    ) -> None:
        a.row = {
            "prompt": a.prompt,
            "attempt": a.id,
            "sample_index": a.index,
            "step": step,
            "round_kind": str(kind),
            "worker": a.worker,
            "weights_version": step,
            "prompt_tokens": 12,
            "tokens": int(a.done),
            "reward": reward,
            "finish_reason": reason,
            "state": state,
            "start_s": a.start,
            "end_s": self.now,
            "grade_s": None if reward is None else GRADE_S,
            "truncated": None,
            "advantage": None,
            "stale_tokens": 0,
        }
        self.rows.append(a.row)

    def consolidate(self, running: list[Attempt]) -> float:
        for a in running:
            if a.worker == 1:
                a.worker = 0
                self.record(
                    ev.AttemptMigrated(
                        attempt=AttemptId(a.id), engine=EngineId(0), tokens=int(a.done)
                    )
                )
        return self.now

    def stream(self, step: int, complete: list[str], free_at: float) -> float:
        """Worker 1 takes finished groups once it is free; returns when it is free again."""
        taken = sum(t["prompts"] for t in self.tasks if t["step"] == step)
        while free_at <= self.now and taken < len(complete):
            start = max(free_at, self.now)
            self.task(step, 1, 1, start, start + GRADIENT_S, "accumulate")
            free_at, taken = start + GRADIENT_S, taken + 1
        return free_at if free_at == float("inf") else max(free_at, self.now)

    def lose(self, step: int, graded: dict[str, list[Attempt]], complete: list[str]) -> None:
        for prompt, kept in graded.items():
            if prompt in complete:
                continue
            for a in kept:
                a.row["state"] = "aborted"
            self.queue.append(prompt)
            self.record(
                ev.AttemptAborted(attempt=AttemptId(self.next_attempt), tokens=0),
                do.DeferPrompt(prompt=Prompt(id=PromptId(prompt))),
            )

    def task(
        self, step: int, worker: int, prompts: int, start: float, end: float, kind: str
    ) -> None:
        line = {"step": step, "worker": worker, "prompts": prompts, "start_s": start}
        self.tasks.append(line | {"end_s": end, "kind": kind})

    def update(self, step: int, groups: list[str]) -> None:
        mine = [t for t in self.tasks if t["step"] == step]
        free = [self.now, max([self.now, *(t["end_s"] for t in mine)])]
        for _ in range(len(groups) - sum(t["prompts"] for t in mine)):
            worker = int(free[1] < free[0])
            self.task(step, worker, 1, free[worker], free[worker] + GRADIENT_S, "accumulate")
            free[worker] += GRADIENT_S
        end = max(free)
        for worker in (0, 1):
            self.task(step, worker, 0, end, end + APPLY_S, "apply")
            self.task(step, worker, 0, end + APPLY_S, end + APPLY_S + SYNC_S, "sync")
        self.now = end + APPLY_S + SYNC_S

    def measure(
        self,
        step: int,
        kind: RoundKind,
        begin: float,
        rollout_end: float,
        idle: dict[int, float],
        rows: list[dict[str, Any]],
    ) -> dict[str, Any]:
        kept = [r for r in rows if r["state"] == "kept"]
        lengths = [r["tokens"] for r in kept]
        every = [self.length(r["prompt"], r["sample_index"], step) for r in rows]
        rollout = rollout_end - begin
        line = {
            "step": step,
            "reward": float(np.mean([r["reward"] for r in kept])),
            "step_time": self.now - begin,
            "timing_s/rollout": rollout,
            "timing_s/train": self.now - rollout_end,
            "timing_s/apply": APPLY_S,
            "timing_s/grade_wait": GRADE_S,
            "bubble/rollout_fraction": sum(idle.values()) / (2 * rollout),
            "bubble/worker_idle_s": sum(idle.values()),
            "tail/round_kind": str(kind),
            "tail/kept_vs_true_len": float(np.mean(lengths) / np.mean(every)),
            "tail/aborted_tokens": sum(r["tokens"] for r in rows if r["state"] == "aborted"),
            "tail/long_queue": len(self.queue),
            "completions/mean_length": float(np.mean(lengths)),
            "completions/clipped_ratio": float(
                np.mean([r["finish_reason"] != "stop" for r in kept])
            ),
            "policy_version_max_lag": 0,
        }
        return line | ({"eval/sampled_accuracy": 0.5 + 0.027 * step} if step % 4 == 0 else {})

    def write(self) -> Path:
        self.journal.close()
        pl.DataFrame(self.rows, schema_overrides=REQUIRED).write_parquet(
            self.folder / "samples" / "step-000000.parquet", mkdir=True
        )
        for name, lines in (("workers", self.tasks), ("metrics", self.metrics)):
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (self.folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        rollout = {"prompts_per_step": P0, "num_generations": R0, "max_completion_length": CAP}
        config = {
            "seed": self.seed,
            "output": f"runs/{self.mode}",
            "model": {"path": "demo-0.2M"},
            "data": {"path": "rg:gcd"},
            "rewards": [{"function": "rg"}],
            "rollout": rollout | {"tail_batching": {"mode": self.mode}},
        }
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        accuracy = {
            "before": {"eval/sampled_accuracy": 0.48},
            "after": {"eval/sampled_accuracy": 0.81},
        }
        summary = accuracy | {"steps": len(self.metrics), "prompts_trained": len(self.metrics) * P0}
        (self.folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
        return self.folder


def make_run(folder: Path, mode: str, steps: int = 12, seed: int = 0) -> Path:
    """Write a whole run folder and return it."""
    maker = Maker(folder, mode, seed)
    for step in range(steps):
        maker.step(step)
    return maker.write()


def page_data(html: Path) -> dict[str, Any]:
    """The data that a page embeds."""
    text = html.read_text(encoding="utf-8")
    start = text.index('<script type="application/json" id="data">')
    start = text.index(">", start) + 1
    return json.loads(text[start : text.index("</script>", start)])
