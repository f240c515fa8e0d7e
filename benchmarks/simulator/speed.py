"""CPU seconds of 40 simulated steps of the 32B/32k setting, and peak memory over many small steps.

python -m benchmarks.simulator.speed [--steps 1000]
"""

import time
import tracemalloc

from benchmarks._run import flags
from rollpacker.core.pump import Record
from rollpacker.sim.costs import calibration
from rollpacker.sim.workload.source import load_source
from rollpacker.sim.world.config import SimulationConfig
from rollpacker.sim.world.simulator import Simulation

MODES = ("off", "exact", "race", "prompts", "auto")


def simulation(mode: str, steps: int, prompts: int, record: Record | None) -> Simulation:
    config = SimulationConfig.model_validate(
        {
            "calibration": "paper-32b-32k",
            "workload": "paper-32k",
            "steps": steps,
            "rollout": {
                "prompts_per_step": prompts,
                "num_generations": 8,
                "tail_batching": {"mode": mode},
                "streaming": {"group_tokens": 16384},
            },
        }
    )
    source = load_source(config.workload)
    cal = calibration.load(config.calibration)
    return Simulation(config, cal, source, record)


def main() -> None:
    small = flags(__doc__, steps=(1000, "small steps for memory")).parse_args().steps
    print("40 steps of 128 x 8 on 64 GPUs")
    for mode in MODES:
        journal: list[int] = []
        before = time.process_time()
        result = simulation(
            mode, 40, 128, lambda *line, journal=journal: journal.append(len(line))
        ).run()
        cpu = time.process_time() - before
        print(
            f"  {mode:8} {cpu:5.2f} CPU s  {len(journal) / 40:6.0f} events a step  "
            f"{result.mean_step_s:6.1f} simulated s a step"
        )
    print(f"{small} steps of 4 x 8")
    for mode in ("exact", "race"):
        marks: list[float] = []
        tracemalloc.start()
        for number, _ in enumerate(simulation(mode, small, 4, None).steps(), start=1):
            if number in (small // 4, small // 2, small):
                marks.append(tracemalloc.get_traced_memory()[0] / 1e6)
        peak = tracemalloc.get_traced_memory()[1] / 1e6
        tracemalloc.stop()
        held = " -> ".join(f"{mark:.2f}" for mark in marks)
        print(f"  {mode:8} held {held} MB at a quarter, half and all of them; peak {peak:.2f} MB")


if __name__ == "__main__":
    main()
