"""The report's section on tests, from a samples table."""

import polars as pl

from rollpacker.core.sample_table import PROGRAM
from rollpacker.report.sections.programs import SHOWN, program_section
from rollpacker.report.sections.programs import test_times as times_of


def table(*rows: tuple[str, str | None, list[str], list[float], bool]) -> pl.DataFrame:
    schema = {"prompt": pl.String} | PROGRAM
    level = "standard"
    return pl.DataFrame(
        [(p, v, t, s, level if v else None, f if v else None) for p, v, t, s, f in rows],
        schema=schema,
        orient="row",
    )


SOME = table(
    ("a", "pass", ["pass", "pass"], [0.25, 0.5], False),
    ("a", "tle_cpu", ["pass", "tle_cpu"], [0.125, 4.0], False),
    ("b", "no_code", [], [], False),
    ("b", "fail", ["fail"], [0.0625], True),
    ("c", None, [], [], False),
)


def test_times_are_by_prompt_and_test() -> None:
    assert times_of(SOME.drop_nulls("code_verdict")).rows() == [
        ("a", 0, 2, 1.0, 0.0, 0.25, 0.25, 0.375),
        ("a", 1, 2, 0.5, 0.5, 4.0, 0.5, 4.5),
        ("b", 0, 1, 0.0, 0.0, 0.0625, None, 0.0625),
    ]


def test_the_slowest_and_the_most_failing_are_listed_once() -> None:
    section = program_section(SOME)
    assert section is not None
    assert section.text.startswith(
        "4 responses were graded by their programs: 25.0% passed all tests, 25.0% ran into a "
        "timeout, 0.0% crashed and 25.0% had no program. They took 4.94 s of CPU time at sandbox "
        "level standard. 1 of them have asserts"
    )
    assert section.table is not None
    listed = [(row[0], row[1]) for row in section.table.rows]
    assert listed == [("a", "1"), ("a", "0"), ("b", "0")]


def test_tables_are_short() -> None:
    slow = [(f"s{i}", "pass", ["pass"], [9.0 + i], False) for i in range(50)]
    bad = [(f"f{i}", "fail", ["fail"], [0.1], False) for i in range(50)]
    section = program_section(table(*slow, *bad))
    assert section is not None
    assert section.table is not None
    names = [row[0] for row in section.table.rows]
    assert names[:SHOWN] == [f"s{i}" for i in range(49, 39, -1)]
    assert len(names) == 2 * SHOWN
    assert all(name.startswith("f") for name in names[SHOWN:])


def test_runs_without_programs_have_no_section() -> None:
    assert program_section(SOME.select("prompt")) is None
    section = program_section(SOME.filter(pl.col("prompt") == "c"))
    assert section is not None
    assert section.text == "No program was graded."
