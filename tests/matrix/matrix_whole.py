"""The whole table, and the leaves that no real run on a CPU can show, with the reason."""

import effects_data
import effects_engine
import effects_rest
import effects_rewards
import effects_rollout
import effects_train

FILES = (
    effects_data,
    effects_engine,
    effects_rest,
    effects_rewards,
    effects_rollout,
    effects_train,
)
"""Importing them fills the table."""

PLANNED = "it plans engines that span several devices, which are simulated so far: runs refuse it"
EXCEPTIONS = {
    "rollout.planner=paper": PLANNED,
    "rollout.planner=forecast": PLANNED,
    "engine[vllm].gpu_memory": "a share of a GPU's memory",
    "workers.device=cpu": "without a GPU 'auto' takes the CPU too, so nothing differs here",
}

MOST = 4
"""Never to be raised."""

ELSEWHERE = {
    "engine[vllm].kv_tokens": "tests/engine/test_vllm.py::test_scheduling_changes_no_sample",
    "engine[vllm].max_running": "tests/engine/test_vllm.py::test_no_more_run_than_it_is_told",
}
"""Leaves that show what they do in another environment (``make test-vllm``), and where."""
