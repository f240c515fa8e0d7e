"""The real runtime on a virtual clock and the simulator: same events, same decisions, same times."""

from dataclasses import fields, replace

import pytest
from virtual_runtime import Script, run_runtime, simulate

from rollpacker.core import events as ev

LENGTHS = [3 + (17 * i * i + 29 * i) % 397 for i in range(997)]


def script(mode: str, **changes) -> Script:
    rollout = {
        "prompts_per_step": 6,
        "num_generations": 4,
        "tail_batching": {"mode": mode},
        "streaming": {"group_tokens": 256},
    }
    for key, value in changes.pop("rollout", {}).items():
        if isinstance(value, dict):
            value = rollout.get(key, {}) | value
        rollout[key] = value
    given = {"sizes": {"a": 40}, "kinds": {"a": "math"}, "lengths": LENGTHS, "cap": 300, "steps": 8}
    return Script(rollout=rollout, **(given | changes))


def plain(event):
    if isinstance(event, ev.GradientsAccumulated):
        return replace(event, seconds=0.0)
    return event


def show(line) -> str:
    now, event, made = line
    return f"{now:.9f} {event} -> {made}"


def assert_same(script: Script) -> None:
    runtime, simulated = run_runtime(script).journal.lines, simulate(script).lines
    for place, (real, ours) in enumerate(zip(runtime, simulated, strict=False)):
        same = plain(real[1]) == plain(ours[1]) and real[2] == ours[2]
        same = same and real[0] == pytest.approx(ours[0], rel=1e-9, abs=1e-9)
        if not same:
            before = "\n  ".join(map(show, runtime[max(0, place - 3) : place]))
            pytest.fail(
                f"line {place} of {len(runtime)}\n  {before}\nRUNTIME {show(real)}\nSIM     {show(ours)}"
            )
    assert len(runtime) == len(simulated)


@pytest.mark.parametrize("mode", ["off", "exact", "race", "prompts", "auto"])
def test_every_mode(mode: str) -> None:
    assert_same(script(mode))
