"""What people are shown of a job's promise."""

from pathlib import Path

import pytest
from mux_world import World

from rollpacker.rollmux.service import views


@pytest.mark.parametrize("iterations", [None, 1000])
def test_a_job_that_lost_its_time_to_a_restart_is_not_shown_as_kept(
    tmp_path: Path, iterations: int | None
) -> None:
    world = World(tmp_path)
    world.submit("a", slo=1.5, iterations=iterations)
    for phase in ("rollout", "train"):
        world.run("a", phase)
        world.wait(5.0)
    assert views.job(world.core, "a")["slo_state"] == "kept"
    world.restart(600.0)
    found = views.job(world.core, "a")
    assert found["slowdown"] > 1.5
    assert found["slo_state"] == ("missed" if iterations is None else "behind")
    world.store.close()
