import io
import os
import re
import sys
import threading

import pytest
from rich.console import Console

from rollpacker.runtime.record.progress import Progress


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
        "rewards/math/mean": 0.31,
        "rewards/format/mean": 0.9,
    }
    return plain | other


def console(terminal, width=80):
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)


def text(shown):
    """What a terminal received, without its control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.file.getvalue())


def evaluation(kind, accuracy):
    return {
        f"eval/{kind}_accuracy": accuracy,
        f"eval/{kind}_mean_length": 210.4,
        "eval/problems": 500.0,
    }


def run(shown, **options):
    progress = Progress(shown, **options)
    progress.start("runs/demo", 100)
    for step in range(12):
        progress.step(metrics(step))
    progress.round("short", 11, 16, 102, 160, 41, 23)
    return progress


def test_live_view():
    shown = console(True)
    progress = run(shown)
    progress.waiting("reward 'math' of attempt 421 (prompt 3f2a) on worker 1 for 12 s")
    progress.close()
    last = text(shown).split("╭")[-1]
    for words in (
        "runs/demo",
        "12/100",
        "11/16",
        "102/160  41 running",
        "0.320  +0.220 in 12 steps",
        "math 0.31 · format 0.9",
        "length 213 · clipped 3% · std 0.200 · loss 0.0123 · grad 0.51",
        "waiting for reward 'math' of attempt 421 (prompt 3f2a) on worker 1 for 12 s",
        "4.5 s/step · 6:36 left",
    ):
        assert words in last, words
    assert all(len(line) <= 80 for line in text(shown).splitlines())


SCHEDULING = ("short round", "23 prompts", "bubble", "rollout 3.1 s", "rollout=3.1", " short ")


@pytest.mark.parametrize("terminal", [True, False])
def test_how_a_run_is_scheduled_is_shown_when_asked_for_only(terminal):
    quiet, full = console(terminal), console(terminal)
    run(quiet).close()
    run(full, verbose=True).close()
    assert not [words for words in SCHEDULING if words in text(quiet)]
    views = ("short round", "23 prompts", "total 12%", "rollout 3.1 s · train 1.2 s")
    for words in views if terminal else ("bubble%", " short ", "rollout=3.1  train=1.2"):
        assert words in text(full), words


@pytest.mark.parametrize("terminal", [True, False])
def test_both_views_show_rewards_evaluations_and_what_is_left(terminal):
    shown = console(terminal)
    progress = Progress(shown)
    progress.start("runs/demo", 100)
    progress.evaluating("sampled", 0, 500)
    progress.evaluating("sampled", 120, 500)
    if terminal:
        assert "120/500 sampled" in render(progress)
    progress.evaluated("sampled", evaluation("sampled", 0.25), 0)
    progress.evaluated("greedy", evaluation("greedy", 0.5), 0)
    for step in range(11):
        progress.step(metrics(step))
    # As a run does: it evaluates first, and the step's line has the result.
    progress.evaluated("sampled", evaluation("sampled", 0.375), 12)
    progress.step(metrics(11))
    progress.close()
    whole = text(shown)
    for words in (
        "accuracy 0.250 with 0 done (sampled; 500 problems, mean length 210)",
        "accuracy 0.500 with 0 done (greedy; 500 problems, mean length 210)",
        "accuracy 0.375 with 12 done (sampled, +0.125 on that with 0; 500 problems, ",
        "6:36",
    ):
        assert words in whole, words
    if terminal:
        assert "sampled 0.375 with 12 done · greedy 0.500 with 0 done" in whole
        assert "evaluating" not in whole.split("╭")[-1]
        assert "math 0.31" in whole
        assert "format 0.9" in whole
    else:
        assert "evaluating, 0 of 500 (sampled)" in whole
        assert "math=0.31  format=0.9" in whole
        assert "12/100" in whole


def render(progress):
    shown = console(True)
    shown.print(progress._view())
    return text(shown)


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


def test_who_is_waited_for_is_said_now_and_then_however_many_there_are():
    shown = console(False)
    progress = Progress(shown)
    for left in range(500, 0, -1):
        progress.waiting(f"the response of attempt 3 and {left} more")
        progress.evaluating("sampled", 500 - left, 500)
    lines = text(shown).splitlines()
    assert lines[0] == "waiting for the response of attempt 3 and 500 more"
    assert lines[1] == "evaluating, 0 of 500 (sampled)"
    assert len(lines) == 2


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
    assert lines[1].split()[0] == "done"
    assert len(lines) == 2 + 12 + 2
    values = "1/100 0.1000 0.200 213 3.0 0.0123 0.51 4.5 7:25 math=0.31 format=0.9"
    assert " ".join(lines[2].split()) == values
    ends = [match.end() for match in re.finditer(r"\S+", lines[1])]
    for line in lines[2:14]:
        assert [m.end() for m in re.finditer(r"\S+", line)][:9] == ends[:9]
    assert lines[14:] == ["waiting for worker 1 for 20 s", "checkpoint-12 saved"]


def test_plain_lines_say_where_a_resume_began():
    shown = console(False)
    Progress(shown).start("runs/demo", 100, done=40)
    assert text(shown).splitlines()[0] == "runs/demo: 100 steps, 40 of them done before"


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


def test_events_are_cheap(calls):
    """Less than 2 us of CPU an event."""
    progress = run(console(False))

    def act():
        for count in range(1000):
            progress.round("short", count, 16, 102, 160, 41, 23)

    assert calls(act) / 1000 < 2


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


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_that_has_gone_ends_no_run(terminal):
    ours, theirs = os.openpty()
    os.close(ours)
    file = open(theirs, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
    progress = run(Console(file=file, force_terminal=terminal))
    progress.note("SIGHUP: a checkpoint within 30 s")
    progress.close()
    with pytest.raises(OSError, match="Input/output"):
        file.close()
