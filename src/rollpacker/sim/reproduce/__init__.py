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

_MODULES = (table2, fig9, fig10, fig11, fig12, fig13, table3, table4, fig14)
FIGURES: dict[str, Figure] = {
    module.__name__.rpartition(".")[2]: Figure(module.TITLE, module.jobs, module.rows)
    for module in _MODULES
}
"""By the name of the table or figure."""
