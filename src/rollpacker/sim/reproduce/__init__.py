"""The paper's tables and figures, from the real policies on simulated machines."""

from __future__ import annotations

from rollpacker.sim.reproduce import (
    fig9,
    fig10,
    fig11,
    fig12,
    fig13,
    fig14,
    table2,
    table3,
    table4,
)
from rollpacker.sim.reproduce.figure import Figure

FIGURES: dict[str, Figure] = {
    "table2": Figure(table2.TITLE, table2.jobs, table2.rows),
    "fig9": Figure(fig9.TITLE, fig9.jobs, fig9.rows),
    "fig10": Figure(fig10.TITLE, fig10.jobs, fig10.rows),
    "fig11": Figure(fig11.TITLE, fig11.jobs, fig11.rows),
    "fig12": Figure(fig12.TITLE, fig12.jobs, fig12.rows),
    "fig13": Figure(fig13.TITLE, fig13.jobs, fig13.rows),
    "table3": Figure(table3.TITLE, table3.jobs, table3.rows),
    "table4": Figure(table4.TITLE, table4.jobs, table4.rows),
    "fig14": Figure(fig14.TITLE, fig14.jobs, fig14.rows),
}
"""By the name of the table or figure."""
