"""Importance weights between sampler and trainer, as TRL and three releases of verl call them."""

from __future__ import annotations

from typing import Any

import pytest
from test_convert import trl_job, verl_job

from rollpacker.config import SamplerCorrectionConfig

VLLM = {"use_vllm": True}
TRL = "vllm_importance_sampling_"
NAME = {"actor_rollout_ref__rollout__name": "vllm"}
VERL, EARLIER = "algorithm__rollout_correction__", "algorithm__rollout_is"
CAP = "actor_rollout_ref__actor__tis_imp_ratio_cap"
NONE = SamplerCorrectionConfig()


def wanted(kind: str, level: str, low: float = 0.5, high: float = 2.0) -> SamplerCorrectionConfig:
    return SamplerCorrectionConfig.model_validate(
        {"kind": kind, "level": level, "low": low, "high": high}
    )


@pytest.mark.parametrize(
    ("keys", "correction"),
    [
        ({}, wanted("mask", "sequence", 0.0, 3.0)),
        ({"correction": True}, wanted("mask", "sequence", 0.0, 3.0)),
        ({"correction": False, "mode": "token_mask"}, NONE),
        ({"mode": "token_truncate", "cap": 2.0}, wanted("truncate", "token")),
        ({"mode": "sequence_truncate", "clip_max": 4, "cap": 5}, wanted("truncate", "sequence",
                                                                        high=5.0)),
        ({"mode": "token_mask", "clip_min": 0.5, "clip_max": 2}, wanted("mask", "token")),
    ],
)  # fmt: skip
def test_of_trl(tmp_path, keys: dict[str, Any], correction: SamplerCorrectionConfig) -> None:
    theirs = {f"{TRL}{name}": value for name, value in keys.items()}
    found, run = trl_job(tmp_path, **VLLM, **theirs)
    assert run.train.sampler_correction == correction
    assert found.refused == {}
    if correction != NONE:
        assert set(theirs) <= {*found.translated, f"{TRL}clip_max"}


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({f"{TRL}clip_max": None}, {f"{TRL}clip_max"}),
        ({f"{TRL}mode": "token_truncate", f"{TRL}clip_min": 0.5}, {f"{TRL}clip_min"}),
        ({f"{TRL}clip_max": 0.9}, {f"{TRL}clip_max"}),
        ({f"{TRL}correction": True, "top_p": 0.9}, {f"{TRL}correction"}),
        ({f"{TRL}mode": "token_mask", "top_k": 9}, {f"{TRL}mode"}),
    ],
)
def test_of_trl_by_hand(tmp_path, keys: dict[str, Any], refused: set[str]) -> None:
    found, run = trl_job(tmp_path, **VLLM, **keys)
    assert set(found.refused) == refused
    if f"{TRL}clip_min" not in refused:
        assert run.train.sampler_correction == NONE


def test_of_trl_by_default_where_it_cannot_be(tmp_path) -> None:
    found, run = trl_job(tmp_path, **VLLM, top_p=0.9)
    assert run.train.sampler_correction == NONE
    assert any("rollout.top_p cuts it" in line for line in found.warnings)
    for keys in ({}, VLLM | {"trainer": "RLOOTrainer"}):  # no vLLM; a trainer without weights
        found, run = trl_job(tmp_path, **keys, **{f"{TRL}mode": "token_mask"})
        assert run.train.sampler_correction == NONE
        assert f"{TRL}mode" in found.ignored
    with pytest.raises(ValueError, match="mode=geometric_mask has no counterpart"):
        trl_job(tmp_path, **VLLM, **{f"{TRL}mode": "geometric_mask"})


@pytest.mark.parametrize(
    ("keys", "correction"),
    [
        ({}, NONE),
        ({f"{VERL}rollout_is": "sequence"}, wanted("truncate", "sequence")),
        ({f"{VERL}rollout_is": "token", f"{VERL}rollout_is_threshold": 5}, wanted("truncate",
                                                                                  "token", high=5)),
        ({f"{VERL}rollout_is": "token", f"{VERL}rollout_is_threshold": "0.5_5.0"},
         wanted("mask", "token", high=5)),
        ({f"{VERL}rollout_is": "token", f"{VERL}rollout_is_threshold": None}, NONE),
        ({EARLIER: True, f"{EARLIER}_threshold": 4}, wanted("truncate", "token", high=4)),
        ({EARLIER: True, f"{EARLIER}_threshold": 4, f"{EARLIER}_mode": "mask",
          f"{EARLIER}_level": "geometric"}, wanted("mask", "geometric", 0.25, 4)),
        ({EARLIER: True, f"{EARLIER}_threshold": 4, f"{EARLIER}_mode": "mask",
          f"{EARLIER}_threshold_lower": 0.1}, wanted("mask", "token", 0.1, 4)),
        ({EARLIER: False, f"{EARLIER}_threshold": 4}, NONE),
        ({CAP: 3.0}, wanted("truncate", "token", high=3.0)),
        ({CAP: -1}, NONE),
    ],
)  # fmt: skip
def test_of_verl(tmp_path, keys: dict[str, Any], correction: SamplerCorrectionConfig) -> None:
    found, run = verl_job(tmp_path, **NAME, **keys)
    assert run.train.sampler_correction == correction
    assert not any(key.replace("__", ".") in found.refused for key in keys)
    told = any("old log-probabilities" in line for line in found.warnings)
    assert told == (correction == NONE)


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({f"{VERL}rollout_rs": "seq_mean_k1"}, "rollout_correction.rollout_rs"),
        ({f"{VERL}loss_type": "reinforce"}, "rollout_correction.loss_type"),
        ({f"{VERL}rollout_is": "token", f"{VERL}rollout_is_batch_normalize": True},
         "rollout_correction.rollout_is_batch_normalize"),
        ({EARLIER: True, f"{EARLIER}_threshold": 4, f"{EARLIER}_veto_threshold": 1e-4},
         "rollout_is_veto_threshold"),
        ({f"{VERL}rollout_is": "token", f"{VERL}rollout_is_threshold": 0.9},
         "rollout_correction.rollout_is"),
    ],
)  # fmt: skip
def test_of_verl_by_hand(tmp_path, keys: dict[str, Any], refused: str) -> None:
    found, _ = verl_job(tmp_path, **NAME, **keys)
    assert f"algorithm.{refused}" in found.refused


def test_with_bypass_mode_verl_has_no_weights(tmp_path) -> None:
    keys = {f"{VERL}bypass_mode": True, f"{VERL}rollout_is": "token"}
    found, run = verl_job(tmp_path, **NAME, **keys)
    assert run.train.sampler_correction == NONE
    assert "algorithm.rollout_correction.rollout_is" in found.ignored


def test_a_bound_that_is_none_is_one_line(tmp_path) -> None:
    keys = {f"{VERL}rollout_is": "token", f"{VERL}rollout_is_threshold": "much"}
    with pytest.raises(ValueError, match=r"rollout_is_threshold=much: expected a number, or low"):
        verl_job(tmp_path, **NAME, **keys)
