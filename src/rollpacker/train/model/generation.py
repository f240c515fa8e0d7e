"""What a model's ``generation_config`` asks for beyond sampling from the model's distribution.

Responses are sampled as they are trained on: from the softmax of the logits, with the run's own
temperature, top_p and top_k. Whatever else would shape them is not applied.
"""

from __future__ import annotations

from typing import Any

NEUTRAL: dict[str, Any] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "constraints": None,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "max_time": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "min_p": 0.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "repetition_penalty": 1.0,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "token_healing": False,
    "top_h": None,
    "typical_p": 1.0,
    "watermarking_config": None,
}
"""Keys that change which tokens are drawn, or where a response ends, and what changes nothing."""

OURS = ("temperature", "top_p", "top_k")
"""Keys that the run's configuration has under ``rollout``."""


def shaping(generation: Any) -> dict[str, Any]:
    """What a ``GenerationConfig`` sets of ``NEUTRAL``'s keys that is not neutral."""
    given = {key: getattr(generation, key, None) for key in NEUTRAL}
    return {
        key: value
        for key, value in given.items()
        if value not in (None, NEUTRAL[key]) and value not in ([], {})
    }


def notes(generation: Any, rollout: Any) -> list[str]:
    """Lines for the user of a run: what is not applied, and what the run samples with instead.

    Args:
        generation: the model's ``GenerationConfig``.
        rollout: the run's ``rollout`` section.
    """
    lines: list[str] = []
    if found := shaping(generation):
        asked = ", ".join(f"{key}={value}" for key, value in found.items())
        lines.append(
            f"WARNING model.path: its generation_config.json asks for {asked}, which is not "
            "applied: responses come from the distribution that is trained; take it out there "
            "before you deploy the model, or its users sample otherwise"
        )
    own = {key: getattr(generation, key, None) for key in OURS}
    ours = {key: getattr(rollout, key) for key in OURS}
    differ = [key for key, value in own.items() if value is not None and value != ours[key]]
    if differ:
        theirs = ", ".join(f"{key}={own[key]}" for key in differ)
        taken = ", ".join(f"rollout.{key}={ours[key]}" for key in differ)
        lines.append(f"sampling with {taken}; the model's generation_config.json says {theirs}")
    return lines


def check_generation(generation: Any, given: tuple[str, ...]) -> None:
    """Raise ``ValueError`` in one line where plain TRL's sampling would be shaped.

    Args:
        generation: the model's ``GenerationConfig``.
        given: keys that the trainer sets itself, whatever the model says.
    """
    found = [key for key in shaping(generation) if key not in given]
    if found:
        raise ValueError(
            f"the model's generation_config sets {', '.join(found)}, which trl.GRPOTrainer would "
            "sample with and rollpacker's engines cannot: set "
            f"{' = '.join(f'model.generation_config.{key}' for key in found)} = None, or train "
            "with trl.GRPOTrainer"
        )
