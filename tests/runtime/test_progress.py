import io
import re
import sys
import threading
import time

import pytest
from rich.console import Console

from rollpacker.runtime.progress import Progress, sparkline


def metrics(step, **other):
    plain = {
        "step": step,
        "reward": 0.1 + 0.02 * step,
        "reward_std": 0.2,
        "completions/mean_length": 213.0,
        "completions/clipped_ratio": 0.03,
        "loss": 0.0123,
        "grad_norm": 0.51,
        "step_time": 4.5,
        "timing_s/rollout": 3.1,
        "timing_s/train": 1.2,
        "tail/round_kind": "short",
        "bubble/total": 0.12,
    }
    return plain | other


def console(terminal, width=80):
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)


def text(shown):
    """What a terminal received, without its control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.file.getvalue())


def run(shown):
    progress = Progress(shown)
    progress.start("runs/demo", 100)
    for step in range(12):
        progress.step(metrics(step))
    progress.round("short", 11, 16, 102, 160, 41, 23)
    return progress


def test_live_view(tmp_path):
    shown = console(True)
    progress = run(shown)
    progress.waiting("reward 'math' of attempt 421 (prompt 3f2a) on worker 1 for 12 s")
    progress.close()
    last = text(shown).split("╭")[-1]
    for words in (
        "runs/demo",
        "13/100",
        "11/16 short round",
        "102/160  41 running",
        "23 prompts",
        "▁▂▂▃▄▄▅▅▆▇▇█  0.320  +0.220 in 12 steps",
        "length 213 · clipped 3% · loss 0.0123 · grad 0.51 · bubble 12%",
        "rollout 3.1 s  train 1.2 s",
        "waiting for reward 'math' of attempt 421 (prompt 3f2a) on worker 1 for 12 s",
        "4.5 s/step · 6:36 left",
    ):
        assert words in last, words
    assert all(len(line) <= 80 for line in text(shown).splitlines())


@pytest.mark.parametrize("width", [20, 40, 300])
def test_any_width(width):
    shown = console(True, width)
    run(shown).close()
    assert "runs/demo" in text(shown)


def test_view_before_the_first_step():
    shown = console(True)
    progress = Progress(shown)
    progress.start("runs/demo", 0)
    progress.close()
    assert "0/0" in text(shown)


def test_a_wait_ends_with_the_step():
    shown = console(True)
    progress = run(shown)
    progress.waiting("worker 1")
    progress.step(metrics(12))
    progress.close()
    assert "waiting" not in text(shown).split("╭")[-1]


def test_notes_stay_above_the_view_and_are_taken_literally():
    shown = console(True)
    progress = run(shown)
    progress.note("WARNING [/bold] 100% [red]clipped")
    progress.close()
    assert "WARNING [/bold] 100% [red]clipped" in text(shown)


def test_plain_lines():
    shown = console(False)
    progress = run(shown)
    progress.waiting("worker 1 for 20 s")
    progress.waiting("worker 1 for 20 s")
    progress.waiting(None)
    progress.note("checkpoint-12 saved")
    progress.close()
    lines = text(shown).splitlines()
    assert lines[0] == "runs/demo: 100 steps"
    assert lines[1].startswith("step   round    reward")
    assert len(lines) == 2 + 12 + 2
    values = "0 short 0.1000 0.200 213 3.0 0.0123 0.51 4.5 12.0 rollout=3.1 train=1.2"
    assert " ".join(lines[2].split()) == values
    ends = [match.end() for match in re.finditer(r"\S+", lines[1])]
    for line in lines[2:14]:
        assert [m.end() for m in re.finditer(r"\S+", line)][:10] == ends[:10]
    assert lines[14:] == ["waiting for worker 1 for 20 s", "checkpoint-12 saved"]


def test_plain_lines_say_where_a_resume_began():
    shown = console(False)
    Progress(shown).start("runs/demo", 100, done=40)
    assert text(shown).splitlines()[0] == "runs/demo: 100 steps, resumed after step 40"


def test_missing_numbers_do_not_matter():
    shown = console(False)
    progress = Progress(shown)
    progress.start("runs/demo", 2)
    progress.step({"step": 0, "loss": float("nan")})
    assert len(text(shown).splitlines()) == 3


def test_patience_is_three_median_steps():
    progress = Progress(console(False))
    assert progress.patience() == 60.0
    for seconds in (10.0, 11.0, 500.0):
        progress.step(metrics(0, step_time=seconds))
    assert progress.patience() == 33.0


def test_sparkline():
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"


def test_events_are_cheap():
    """Less than 2 us of CPU an event; allowed 4 here, for slow machines."""
    progress = run(console(False))
    began = time.process_time()
    for count in range(50_000):
        progress.round("short", count, 16, 102, 160, 41, 23)
    assert (time.process_time() - began) / 50_000 < 4e-6


def test_events_and_the_drawing_thread_do_not_collide():
    failures = []
    threading.excepthook, before = failures.append, threading.excepthook
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    progress = Progress(console(True))
    progress.start("runs/demo", 100)
    drawer = threading.Thread(target=lambda: [progress._view() for _ in range(300)])
    try:
        drawer.start()
        step = 0
        while drawer.is_alive():
            progress.round("short", step % 16, 16, 2, 3, 4, 5)
            progress.waiting("x")
            step += 1
            if step % 50 == 0:
                progress.step(metrics(step))
        drawer.join()
    finally:
        sys.setswitchinterval(interval)
        threading.excepthook = before
        progress.close()
    assert not failures
