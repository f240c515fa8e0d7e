"""The whole table, and the leaves that no real run on a CPU can show, with the reason."""

import math
import operator
import os
from collections import Counter

import effects_data
import effects_rest
import effects_rollout
import effects_train
import numpy as np
import polars as pl
import pytest
from losses import expected_loss
from matrix_table import take_rows
from runtime_jobs import SPECIALS

from rollpacker.env.calls.calls import FORMATS

NAMES = {
    **{module.__name__: module for module in (math, operator, os, pytest)},
    "Counter": Counter,
    "SPECIALS": SPECIALS,
    "expected_loss": expected_loss,
    "np": np,
    "pl": pl,
}
for module in (effects_data, effects_rest, effects_rollout, effects_train):
    NAMES |= {
        name: value
        for name, value in vars(module).items()
        if getattr(value, "__module__", module.__name__) == module.__name__
    }
take_rows(NAMES)

EXCEPTIONS = {
    "engine[vllm].gpu_memory": "a share of a GPU's memory",
    "devices.kind=cpu": "without a GPU 'auto' takes the CPU too, so nothing differs here",
}

MOST = 2
"""Never to be raised."""

PARTIAL = "tests/runtime/step/test_partial_runs.py::"
ELSEWHERE = {
    "rollout.tail_batching.mode=partial": (
        f"{PARTIAL}test_a_response_goes_on_from_the_tokens_that_it_had"
    ),
    "rollout.tail_batching.max_staleness": (
        f"{PARTIAL}test_nothing_is_older_than_it_may_be_and_metrics_say_how_old"
    ),
    "rollout.tail_batching.stale_tokens=mask": f"{PARTIAL}test_other_answers_to_stale_tokens",
    "rollout.tail_batching.stale_tokens=fresh": f"{PARTIAL}test_other_answers_to_stale_tokens",
    "cluster.address": (
        "tests/runtime/cluster/test_ray.py::test_a_job_runs_on_the_nodes_of_a_ray_cluster"
    ),
    "cluster.restarts": "tests/job/run/test_comeback.py::test_not_for_ever",
    "devices.nodes": "tests/runtime/cluster/test_cluster_runs.py::test_nodes_change_nothing",
    "engine[vllm].kv_tokens": (
        "tests/engine/vllm_engine/test_vllm.py::test_scheduling_changes_no_sample"
    ),
    "engine[vllm].max_running": (
        "tests/engine/vllm_engine/test_vllm.py::test_no_more_run_than_it_is_told"
    ),
    "engine[vllm].tensor_parallel": (
        "tests/runtime/cluster/test_spanning_runs.py::test_the_first_step_samples_what_mini_does"
    ),
    "devices.emulate": (
        "tests/emulate/test_emulated_runs.py::test_a_run_keeps_what_the_simulator_keeps"
    ),
    **{
        f"devices.turns={way}": (
            "tests/runtime/step/test_turns_runs.py::"
            "test_turns_change_nothing_but_who_has_the_memory"
        )
        for way in ("off", "engine", "both")
    },
    "rollout.streaming.scaling=off": (
        "tests/runtime/step/test_told_costs.py::test_nothing_is_compared_where_moves_gain_nothing"
    ),
    "rollout.planner=paper": (
        "tests/runtime/step/test_planner_runs.py::"
        "test_pressure_puts_devices_together_and_a_resume_forgets_none_of_it"
    ),
    "environment.kind=tools": ("tests/examples/test_learned_examples.py::test_the_run"),
    "environment.kind=agent": (
        "tests/runtime/attempts/test_episode_runs.py::test_an_agent_is_trained_as_it_is"
    ),
    "environment.variables": (
        "tests/runtime/attempts/test_episode_runs.py::test_an_agent_is_trained_as_it_is"
    ),
    **{
        f"environment.call_format={form}": (
            "tests/env/processes/test_environment_formats.py::"
            "test_calls_are_read_in_the_format_that_is_named"
        )
        for form in FORMATS
    },
}
"""Leaves that show what they do in another environment (``make test-cluster``) or with files of
their own, and where."""
