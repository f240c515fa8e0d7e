"""Our gradient and advantages against those of TRL's own trainers, on the same groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peer_case import (
    CAP,
    COUNT,
    LIMIT,
    SIZE,
    Found,
    check_reach,
    largest,
    make_model,
    make_tokenizer,
    ours,
    rewarded,
    sampled,
    samples,
    weights,
)
from peer_options import TRL_CASES, Case

from rollpacker.config import TrainConfig
from rollpacker.runtime.record.metrics import reward_metrics

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where TRL takes its reference from."""
    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    return folder


def trl_trainer(case: Case, model: Any, folder: Path) -> Any:
    """TRL's trainer, whose responses are the case's."""
    import trl
    from datasets import Dataset

    rows = sampled(case)
    rollout = {
        "prompt_ids": [row.prompt_tokens.tolist() for row in rows],
        "completion_ids": [row.tokens.tolist() for row in rows],
        "logprobs": [row.logprobs.tolist() for row in rows],
    }
    assert case.trl is not None
    kind = "RLOO" if case.ours["algorithm"]["kind"] == "rloo" else "GRPO"
    args = getattr(trl, f"{kind}Config")(
        output_dir=str(folder / "out"),
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=COUNT,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        num_generations=SIZE,
        num_iterations=2 if case.drift else 1,  # so that it keeps the sampler's probabilities
        max_completion_length=CAP,
        **case.trl,
    )

    class Scripted(getattr(trl, f"{kind}Trainer")):
        """Its responses are given; RLOO's has no ``rollout_func``."""

        def _generate(self, prompts: Any) -> Any:
            if kind == "GRPO":
                found = super()._generate(prompts)
                # From here on it only says whose the log-probabilities are.
                self.use_vllm = bool(case.noise)
                return found
            texts = self.processing_class.batch_decode(rollout["completion_ids"])
            return rollout["prompt_ids"], rollout["completion_ids"], texts

    trainer = Scripted(
        model=model,
        reward_funcs=lambda completions, **_: [row.reward for row in rows],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": f"w{i + 2}"} for i in range(SIZE)]),
        processing_class=make_tokenizer(),
        **({"rollout_func": lambda prompts, trainer: dict(rollout)} if kind == "GRPO" else {}),
    )
    trainer.current_gradient_accumulation_steps = 1  # set where its loop begins
    return trainer


def theirs(case: Case, checkpoint: Path, folder: Path) -> tuple[Found, dict[str, Any]]:
    """TRL's gradient, and the batch that it was computed from."""
    model = type(make_model()).from_pretrained(checkpoint)
    state = weights(model, case.drift)
    trainer = trl_trainer(case, model, folder)
    trainer.model.train()
    model.load_state_dict(state.sampler)
    inputs = trainer._generate_and_score_completions(
        [{"prompt": "w2"} for _ in samples(case.unscored)]
    )
    model.load_state_dict(state.now)
    trainer._compute_loss(model, inputs).backward()
    metrics = {n: float(v[-1]) for n, v in trainer._metrics["train"].items() if v}
    gradient = {n: p.grad for n, p in model.named_parameters()}
    return Found(gradient, inputs["advantages"].numpy(), metrics), inputs


def token_ratios(inputs: dict[str, Any], case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Ratio and advantage of every token of the loss."""
    model = make_model()
    state = weights(model, case.drift)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    width = inputs["completion_ids"].shape[1]
    found = []
    for each in (state.sampler, state.now):
        model.load_state_dict(each)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=attention).logits[:, -width - 1 : -1]
        logp = logits.log_softmax(-1).gather(2, inputs["completion_ids"][..., None])[..., 0]
        found.append(logp)
    counts = inputs["completion_mask"].bool()
    advantages = inputs["advantages"][:, None].expand_as(counts)
    return (found[1] - found[0]).exp()[counts].numpy(), advantages[counts].numpy()


@pytest.mark.parametrize("case", TRL_CASES, ids=lambda case: case.name)
def test_gradient_and_advantages_are_trls(case: Case, checkpoint: Path, tmp_path, record) -> None:
    mine = ours(case)
    peer, inputs = theirs(case, checkpoint, tmp_path)
    check_reach(case, mine, *token_ratios(inputs, case))
    if case.ours.get("mask_truncated_completions"):
        assert (inputs["completion_mask"].sum(1) == 0).any()
    advantages = float(np.abs(mine.advantages - peer.advantages).max())
    gradient = largest(mine.gradient, peer.gradient)
    assert case.trl is not None
    call = ", ".join(f"{key}={value}" for key, value in case.trl.items())
    record("trl", case.name, call, gradient, advantages)
    assert advantages <= LIMIT * np.abs(peer.advantages).max()
    assert gradient <= LIMIT
    for name in ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "kl"):
        if name in peer.metrics:
            assert mine.metrics[name] == pytest.approx(peer.metrics[name], rel=1e-4), name
    if case.noise and case.ours.get("beta"):  # else not all tokens are run
        theirs_apart = peer.metrics["sampling/sampling_logp_difference/mean"]
        mine_apart = mine.metrics["sampler/abs_logprob_difference"]
        assert mine_apart == pytest.approx(theirs_apart, rel=1e-4)
    groups = rewarded(TrainConfig.model_validate(case.ours), samples(case.unscored))
    same = reward_metrics(groups)
    for name in ("reward", "reward_std"):
        assert same[name] == pytest.approx(peer.metrics[name], rel=1e-5), name
