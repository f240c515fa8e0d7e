"""Small jobs for the simulator and the runtime, chosen or drawn at random."""

from hypothesis import strategies as st
from scripted_job import Script

CAP = 120
LENGTHS = [n for n in (3 + (17 * i * i + 29 * i) % 151 for i in range(997)) if n != CAP]
"""A response of exactly the cap may have ended or been cut; the simulator takes it as cut."""


def script(mode: str, *, tail=(), streaming=(), sampling=(), prompts=6, responses=4, **changes):
    rollout = {
        "prompts_per_step": prompts,
        "num_generations": responses,
        "tail_batching": {"mode": mode} | dict(tail),
        "streaming": {"group_tokens": 256} | dict(streaming),
        "dynamic_sampling": dict(sampling),
    }
    given = {"sizes": {"a": 40}, "kinds": {"a": "math"}, "lengths": LENGTHS, "cap": CAP, "steps": 8}
    return Script(rollout=rollout, **(given | changes))


TALKING = ["off", "exact", "race", "prompts", "auto"]
"""Modes of jobs whose responses may talk to tools."""
MODES = [*TALKING, "partial"]


def choice(*values):
    return st.sampled_from(values)


@st.composite
def scripts(draw) -> Script:
    domains = draw(choice(("a",), ("a", "b"), ("a", "b", "c")))
    longest = draw(choice(40, 150, 300))
    cap = draw(choice(longest // 2, longest * 2))
    top = draw(st.integers(0, 1000))
    lengths = [3 + (17 * i * i + 29 * i + top) % longest for i in range(997)]
    factor = choice(1.0, 1.25, 1.5, 2.0)
    mode = draw(choice(*MODES))
    return script(
        mode,
        prompts=draw(st.integers(1, 9)),
        responses=draw(st.integers(1, 6)),
        tail={
            "eta_prompts": draw(factor),
            "eta_responses": draw(factor),
            "audit_every": draw(choice(0, 2, 7)),
            "race_responses": draw(st.booleans()),
            "max_staleness": draw(st.integers(1, 3)),
            "bias_limit": draw(choice(0.5, 0.95)),
        },
        streaming={
            "enabled": draw(choice(True, True, False)),
            "group_tokens": draw(choice(1, 64, 256, 1024)),
            "lookahead": draw(st.integers(1, 3)),
            "scaling": draw(choice("consolidate", "fixed", "off")),
        },
        sampling={"enabled": draw(st.booleans()), "max_draws": draw(st.integers(1, 4))},
        sizes={domain: draw(st.integers(1, 25)) for domain in domains},
        kinds={domain: draw(choice("math", "judge")) for domain in domains},
        lengths=[n for n in lengths if n != cap],
        cap=cap,
        steps=draw(st.integers(2, 7)),
        workers=draw(st.integers(1, 4)),
        concurrency=draw(choice(2, 5, 64)),
        seed=draw(st.integers(0, 10**6)),
        ordered=draw(st.booleans()),
        updates=draw(choice(1, 1, 2)),
        judge_slots=draw(choice(1, 3, 100)),
        tools=draw(choice(False, False, True)) and mode != "partial",
    )
