"""Write a run's report and timeline at its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rollpacker.report.reading.run_folder import ReportError


def write_reports(folder: Path, note: Callable[[str], None]) -> None:
    """Write ``report.html`` and ``timeline.json``. ``note`` gets a line if that fails."""
    try:
        from rollpacker.report.run_report import write_report
        from rollpacker.report.timeline import write_timeline

        write_timeline(folder)
        write_report(folder, lambda line: note(f"WARNING {line}"))
    except (ImportError, OSError, ReportError) as error:
        note(f"no report: {error}")
