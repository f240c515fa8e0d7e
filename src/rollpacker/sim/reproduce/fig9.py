"""Figure 9: end to end, RollPacker against veRL and RLHFuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollpacker.sim.reproduce.jobs import SETTINGS, PaperJob, job, three_domains
from rollpacker.sim.reproduce.rows import ResultRow, row
from rollpacker.sim.reproduce.table2 import part, step_s, verl
from rollpacker.sim.world.result import JobResult

TITLE = "End-to-end speed-up"
PAPER = {"8k": (2.03, 1.14), "16k": (2.22, 1.68), "32k": (2.56, 2.24)}
_FUSED = (
    "RLHFuse is stood in for by plain rounds whose rewards overlap with the rollout; "
    "its migration of the tail is left out"
)


def jobs() -> dict[str, PaperJob]:
    """Three systems in each setting, and ours that discards nothing."""
    found: dict[str, PaperJob] = {}
    for setting in SETTINGS:
        found[f"{setting}/veRL"] = verl(setting)
        found[f"{setting}/RLHFuse"] = job(
            setting,
            "off",
            domains=three_domains(),
            asynchronous_grading=True,
            balanced_training=False,
        )
        found[f"{setting}/RollPacker"] = part(setting, "trainer")
        for mode in ("exact", "race"):
            found[f"{setting}/{mode}"] = job(
                setting, mode, domains=three_domains(), streaming={"group_tokens": 16384}
            )
    return found


def rows(results: Mapping[str, Sequence[JobResult]]) -> list[ResultRow]:
    """Speed-ups over both, and of our modes over veRL."""
    found: list[ResultRow] = []
    for setting, (over_verl, over_fuse) in PAPER.items():
        seconds = {
            name: step_s(results[f"{setting}/{name}"])
            for name in ("veRL", "RLHFuse", "RollPacker", "exact", "race")
        }
        base, fused, ours = seconds["veRL"], seconds["RLHFuse"], seconds["RollPacker"]
        note = "costs fitted to these step times"
        name = f"fig9/{setting}/RollPacker over"
        found.append(row(f"{name} veRL", over_verl, base / ours, fitted=True, note=note))
        found.append(row(f"{name} RLHFuse", over_fuse, fused / ours, note=_FUSED))
        for mode, what in (
            ("exact", "mode exact: nothing is discarded"),
            ("race", "mode race with the tail consolidated by our rule"),
        ):
            note = f"{what}; not in the paper"
            found.append(
                row(f"fig9/{setting}/{mode} over veRL", None, base / seconds[mode], note=note)
            )
    return found
