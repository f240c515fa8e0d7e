"""The cases: each algorithm with its options, as we, TRL and verl are told them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One algorithm with its options, as each of the three calls it.

    Args:
        name: of the row in docs/compatibility.md.
        ours: the section ``train``.
        trl: arguments of TRL's configuration; None where it has no such thing.
        verl: see ``test_verl.py``; None where it has no such thing.
        drift: scale of the update since the responses were sampled; 0 is on-policy.
        unscored: one response has no reward.
        noise: by how much what the sampler says is off, nats.
    """

    name: str
    ours: dict[str, Any]
    trl: dict[str, Any] | None = None
    verl: dict[str, Any] | None = None
    drift: float = 0.5
    unscored: bool = True
    noise: float = 0.0


def _grpo(**options: Any) -> dict[str, Any]:
    return {"algorithm": {"kind": "grpo", **options}}


_TRL = {"loss_type": "dapo", "beta": 0.0}
_SMALL = {"std_epsilon": 1e-4}
"""TRL's; verl's is the default."""
_BETA = {"beta": 0.2}


def _corrected(kind: str, level: str, low: float = 0.5, high: float = 2.0) -> dict[str, Any]:
    return {"sampler_correction": {"kind": kind, "level": level, "low": low, "high": high}}


def _weighed(mode: str, low: float | None, high: float) -> dict[str, Any]:
    start = "vllm_importance_sampling"
    return {f"{start}_mode": mode, f"{start}_clip_min": low, f"{start}_clip_max": high}


TRL_CASES = (
    Case("grpo, on-policy", _grpo(**_SMALL), _TRL, drift=0.0),
    Case("grpo", _grpo(**_SMALL), _TRL),
    Case(
        "grpo, loss_type=sequence_mean",
        _grpo(**_SMALL, loss_type="sequence_mean"),
        _TRL | {"loss_type": "grpo"},
    ),
    Case(
        "grpo, scale_rewards=batch",
        _grpo(**_SMALL, scale_rewards="batch"),
        _TRL | {"scale_rewards": "batch"},
    ),
    Case("grpo, scale_rewards=none", _grpo(scale_rewards="none"), _TRL | {"scale_rewards": "none"}),
    Case("grpo, delta=1.5", _grpo(**_SMALL, delta=1.5), _TRL | {"delta": 1.5}),
    Case(
        "grpo, mask_truncated_completions",
        _grpo(**_SMALL) | {"mask_truncated_completions": True},
        _TRL | {"mask_truncated_completions": True},
    ),
    Case(
        "grpo, sequence_mean, mask_truncated_completions",
        _grpo(**_SMALL, loss_type="sequence_mean") | {"mask_truncated_completions": True},
        _TRL | {"loss_type": "grpo", "mask_truncated_completions": True},
    ),
    Case("grpo, beta, on-policy", _grpo(**_SMALL) | _BETA, _TRL | _BETA, drift=0.0),
    Case("grpo, beta", _grpo(**_SMALL) | _BETA, _TRL | _BETA),
    Case(
        "grpo, beta, kl_bias_correction=false",
        _grpo(**_SMALL) | _BETA | {"kl_bias_correction": False},
        _TRL | _BETA | {"use_bias_correction_kl": False},
    ),
    Case(
        "dr_grpo",
        {"algorithm": {"kind": "dr_grpo"}} | _BETA,
        _TRL | _BETA | {"loss_type": "dr_grpo", "scale_rewards": "none"},
    ),
    Case(
        "dr_grpo, mask_truncated_completions",
        {"algorithm": {"kind": "dr_grpo"}, "mask_truncated_completions": True},
        _TRL
        | {"loss_type": "dr_grpo", "scale_rewards": "none", "mask_truncated_completions": True},
    ),
    Case("dapo", {"algorithm": {"kind": "dapo", **_SMALL}}, _TRL | {"epsilon_high": 0.28}),
    Case("rloo", {"algorithm": {"kind": "rloo"}}, {"beta": 0.0}, drift=0.1),
    Case(
        "reinforce_pp, whiten=batch",
        {"algorithm": {"kind": "reinforce_pp", "whiten": "batch"}},
        _TRL | {"scale_rewards": "batch"},
    ),
    Case(
        "gspo",
        {"algorithm": {"kind": "gspo", **_SMALL}} | _BETA,
        _TRL
        | _BETA
        | {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 3e-4,
            "epsilon_high": 4e-4,
        },
        drift=0.002,
    ),
    Case(
        "grpo, sampler_correction, truncate, token",
        _grpo(**_SMALL) | _corrected("truncate", "token", high=1.2),
        _TRL | _weighed("token_truncate", None, 1.2),
        noise=0.3,
    ),
    Case(
        "grpo, on-policy, sampler_correction, mask, token",
        _grpo(**_SMALL) | _corrected("mask", "token", 0.7, 1.3),
        _TRL | _weighed("token_mask", 0.7, 1.3),
        drift=0.0,
        noise=0.3,
    ),
    Case(
        "grpo, sampler_correction, truncate, sequence",
        _grpo(**_SMALL) | _corrected("truncate", "sequence"),
        _TRL | _weighed("sequence_truncate", None, 2.0),
        noise=0.3,
    ),
    Case(
        "grpo, beta, sampler_correction, mask, sequence",
        _grpo(**_SMALL) | _BETA | _corrected("mask", "sequence", 0.0, 3.0),
        _TRL | _BETA | _weighed("sequence_mask", None, 3.0),
        noise=0.3,
    ),
)

_VERL = {"advantage": "grpo", "loss": "vanilla", "mode": "token-mean", "clip_ratio_c": 1e9}
VERL_CASES = (
    Case("grpo, on-policy", _grpo(), verl=_VERL, drift=0.0, unscored=False),
    Case("grpo", _grpo(), verl=_VERL, unscored=False),
    Case(
        "grpo, loss_type=sequence_mean",
        _grpo(loss_type="sequence_mean"),
        verl=_VERL | {"mode": "seq-mean-token-mean"},
        unscored=False,
    ),
    Case(
        "grpo, scale_rewards=none",
        _grpo(scale_rewards="none"),
        verl=_VERL | {"std": False},
        unscored=False,
    ),
    Case("grpo, delta=1.5", _grpo(delta=1.5), verl=_VERL | {"clip_ratio_c": 1.5}, unscored=False),
    Case(
        "grpo, mask_truncated_completions",
        _grpo() | {"mask_truncated_completions": True},
        verl=_VERL,
        unscored=False,
    ),
    Case(
        "grpo, beta, kl_bias_correction=false",
        _grpo() | _BETA | {"kl_bias_correction": False},
        verl=_VERL,
        unscored=False,
    ),
    Case(
        "dr_grpo",
        {"algorithm": {"kind": "dr_grpo"}},
        verl=_VERL | {"std": False, "mode": "seq-mean-token-sum-norm"},
        unscored=False,
    ),
    Case(
        "dapo",
        {"algorithm": {"kind": "dapo", "delta": 1.5}},
        verl=_VERL | {"clip_ratio_high": 0.28, "clip_ratio_c": 1.5},
        unscored=False,
    ),
    Case(
        "rloo, on-policy",
        {"algorithm": {"kind": "rloo"}},
        verl=_VERL | {"advantage": "rloo", "mode": "seq-mean-token-sum"},
        drift=0.0,
        unscored=False,
    ),
    Case(
        "reinforce_pp",
        {"algorithm": {"kind": "reinforce_pp"}},
        verl=_VERL | {"advantage": "reinforce_plus_plus_baseline"},
        unscored=False,
    ),
    Case(
        "reinforce_pp, mask_truncated_completions",
        {"algorithm": {"kind": "reinforce_pp"}, "mask_truncated_completions": True},
        verl=_VERL | {"advantage": "reinforce_plus_plus_baseline"},
        unscored=False,
    ),
    Case(
        "gspo",
        {"algorithm": {"kind": "gspo"}},
        verl=_VERL
        | {
            "loss": "gspo",
            "mode": "seq-mean-token-mean",
            "clip_ratio_low": 3e-4,
            "clip_ratio_high": 4e-4,
        },
        drift=0.002,
        unscored=False,
    ),
    Case(
        "grpo, sampler_correction, truncate, token",
        _grpo() | _corrected("truncate", "token", high=1.2),
        verl=_VERL | {"rollout_is": "token", "rollout_is_threshold": "1.2"},
        unscored=False,
        noise=0.3,
    ),
    Case(
        "grpo, sampler_correction, mask, token",
        _grpo() | _corrected("mask", "token", 0.7, 1.3),
        verl=_VERL | {"rollout_is": "token", "rollout_is_threshold": "0.7_1.3"},
        unscored=False,
        noise=0.3,
    ),
    Case(
        "grpo, beta, sampler_correction, truncate, sequence",
        _grpo() | _BETA | {"kl_bias_correction": False} | _corrected("truncate", "sequence"),
        verl=_VERL | {"rollout_is": "sequence", "rollout_is_threshold": "2.0"},
        unscored=False,
        noise=0.3,
    ),
    Case(
        "gspo, sampler_correction, mask, sequence",
        {"algorithm": {"kind": "gspo"}} | _corrected("mask", "sequence", 0.3, 3.0),
        verl=_VERL
        | {
            "loss": "gspo",
            "mode": "seq-mean-token-mean",
            "clip_ratio_low": 3e-4,
            "clip_ratio_high": 4e-4,
            "rollout_is": "sequence",
            "rollout_is_threshold": "0.3_3.0",
        },
        drift=0.002,
        unscored=False,
        noise=0.3,
    ),
)
