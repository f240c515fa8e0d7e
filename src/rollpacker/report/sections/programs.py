"""The report's section on tests that programs were run against."""

from __future__ import annotations

import polars as pl

from rollpacker.report.drawing.page import Grid, Section, count, seconds, share

SHOWN = 10
"""Slowest tests that are listed, and as many that fail most."""

_TIMEOUTS = ("tle_cpu", "tle_idle")


def program_section(samples: pl.DataFrame) -> Section | None:
    """The slowest and the most failing tests; None where no reward runs programs."""
    if "code_verdict" not in samples.columns:
        return None
    graded = samples.filter(pl.col("code_verdict").is_not_null())
    title = "Programs and their tests"
    if graded.is_empty():
        return Section("programs", title, "No program was graded.")
    return Section("programs", title, _text(graded), table=_table(test_times(graded)))


def test_times(samples: pl.DataFrame) -> pl.DataFrame:
    """One row per prompt and test: ``runs``, ``passed`` and ``timeouts`` (shares of the runs),
    ``longest_s`` and ``longest_passed_s`` (CPU seconds; null where none passed), ``total_s``."""
    passed = pl.col("verdict") == "pass"
    return (
        samples.select(
            "prompt",
            pl.int_ranges(pl.col("test_verdicts").list.len()).alias("test"),
            pl.col("test_verdicts").alias("verdict"),
            pl.col("test_cpu_s").alias("cpu_s"),
        )
        .explode("test", "verdict", "cpu_s")
        .drop_nulls("verdict")
        .group_by("prompt", "test")
        .agg(
            pl.len().alias("runs"),
            passed.mean().alias("passed"),
            pl.col("verdict").is_in(_TIMEOUTS).mean().alias("timeouts"),
            pl.col("cpu_s").max().alias("longest_s"),
            pl.col("cpu_s").filter(passed).max().alias("longest_passed_s"),
            pl.col("cpu_s").sum().alias("total_s"),
        )
        .sort("prompt", "test")
    )


def _text(graded: pl.DataFrame) -> str:
    verdicts = graded["code_verdict"].to_list()
    forgeable = sum(graded["forgeable"].to_list())
    cpu_s = sum(sum(tests) for tests in graded["test_cpu_s"].to_list())

    def of(*wanted: str) -> str:
        return share(sum(verdict in wanted for verdict in verdicts) / len(verdicts))

    text = (
        f"{count(graded.height)} responses were graded by their programs: "
        f"{of('pass')} passed all tests, "
        f"{of(*_TIMEOUTS)} ran into a timeout, "
        f"{of('crash')} crashed and "
        f"{of('no_code')} had no program. They took "
        f"{seconds(cpu_s)} of CPU time at sandbox level "
        f"{', '.join(sorted(set(graded['sandbox_level'])))}. "
    )
    if forgeable:
        text += (
            f"{count(forgeable)} of them have asserts, whose success a program can forge: "
            "trust those scores less. "
        )
    return text + (
        "A test that never passes may be wrong; one whose longest time is far above that of the "
        "programs that pass is waited for in vain (grading.code_timeout). Listed are the "
        f"{SHOWN} slowest tests and the {SHOWN} that fail most."
    )


def _table(tests: pl.DataFrame) -> Grid:
    slow = tests.sort("longest_s", descending=True, maintain_order=True).head(SHOWN)
    failing = tests.filter(pl.col("passed") < 1.0)
    failing = failing.sort("passed", "runs", descending=[False, True], maintain_order=True).head(
        SHOWN
    )
    listed = pl.concat([slow, failing]).unique(("prompt", "test"), maintain_order=True)
    header = ("prompt", "test", "runs", "passed", "timeouts", "longest", "longest that passed")
    return Grid(
        header=(*header, "all runs"),
        rows=[
            (
                row["prompt"],
                str(row["test"]),
                count(row["runs"]),
                share(row["passed"]),
                share(row["timeouts"]),
                seconds(row["longest_s"]),
                seconds(row["longest_passed_s"]),
                seconds(row["total_s"]),
            )
            for row in listed.iter_rows(named=True)
        ],
    )
