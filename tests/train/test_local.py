"""The trainer: sums, updates, guards and state."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_algorithms import CONFIGS, GRADIENTS
from tiny_models import MAX_LENGTH, clone, group_batch, make_model, naive_logprobs
from transformers import AutoModelForCausalLM, AutoTokenizer, get_constant_schedule_with_warmup

from rollpacker.config import GRPOConfig, ModelConfig, TrainConfig
from rollpacker.train.base import Partial
from rollpacker.train.state.optimizer import learning_rate
from rollpacker.train.trainer import Trainer


def _trainer(model, tokenizer, lora=None, total_updates=0, **settings):
    config = TrainConfig(**({"learning_rate": 1e-2, "micro_batch_tokens": 100} | settings))
    return Trainer(
        model,
        tokenizer,
        config,
        temperature=1.0,
        max_length=MAX_LENGTH,
        total_updates=total_updates,
        lora=lora,
    )


def _gradient(trainer):
    return trainer._optimizer.sums.clone()


def _weights(trainer):
    return {n: w.clone() for n, w in trainer.weights()}


def _assert_same(one, two):
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


def _total(partials):
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial
    return total


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("updates", [1, 2])
def test_any_split_of_the_groups_gives_the_gradient_of_the_batch(name, updates, tokenizer):
    model = make_model()
    groups = group_batch(model, CONFIGS[name], size=3, off=0.2, old=updates > 1)
    settings = {"algorithm": CONFIGS[name], "updates_per_step": updates}
    whole = _trainer(clone(model), tokenizer, packing="padded", **settings)
    total = whole.accumulate(groups)
    expected = _gradient(whole)

    streamed = _trainer(clone(model), tokenizer, packing="prompt_shared", **settings)
    parts = [streamed.accumulate([g]) for g in groups]
    replica, halves, split = _trainer(clone(model), tokenizer, **settings), [], 0.0
    for half in (groups[:2], groups[2:]):  # one after the other, as each of two replicas has one
        replica.discard()
        halves.append(replica.accumulate(half))
        split = split + _gradient(replica)

    for found, partial in ((_gradient(streamed), _total(parts)), (split, _total(halves))):
        assert (found - expected).norm() / expected.norm() < 1e-5
        assert partial.normaliser == pytest.approx(total.normaliser, rel=1e-9)
        assert partial.tokens == total.tokens
        for key, value in total.sums.items():
            assert partial.sums[key] == pytest.approx(value, rel=1e-4, abs=1e-3), key


@pytest.mark.parametrize("name", GRADIENTS)
def test_streamed_and_batched_updates_are_the_same_for_several_mini_batches(name, tokenizer):
    model = make_model()
    groups = group_batch(model, CONFIGS[name], count=6, off=0.1, old=True)
    settings = {"algorithm": CONFIGS[name], "updates_per_step": 2, "learning_rate": 1e-3}
    batched = _trainer(clone(model), tokenizer, **settings)
    streamed = _trainer(clone(model), tokenizer, **settings)
    for half in (groups[:3], groups[3:]):
        one = batched.apply(batched.accumulate(half))
        two = streamed.apply(_total([streamed.accumulate([g]) for g in half]))
        assert one.applied
        assert two.applied
        assert one.grad_norm == pytest.approx(two.grad_norm, rel=1e-4)
    before = dict(model.named_parameters())
    one, two = _weights(batched), _weights(streamed)
    moved = math.sqrt(sum(float((one[n] - before[n]).square().sum()) for n in one))
    apart = math.sqrt(sum(float((one[n] - two[n]).square().sum()) for n in one))
    assert moved > 0.01
    assert apart / moved < 1e-2  # AdamW divides near-zero gradients by their own size


def test_groups_without_variance_are_not_run_but_count_in_the_normaliser(tokenizer):
    model = make_model()
    groups = group_batch(model, GRPOConfig())
    trainer = _trainer(model, tokenizer)
    partial = trainer.accumulate(groups[-1:])
    assert not _gradient(trainer).any()
    assert partial.sums == {}
    assert partial.normaliser == sum(len(s.tokens) for s in groups[-1].samples)
    update = trainer.apply(partial)
    assert update.applied
    assert update.grad_norm == 0.0
    assert update.metrics.pop("loss") == 0.0
    assert set(update.metrics) == {f"clip_ratio/{x}_mean" for x in ("low", "high", "region")}
    assert not any(update.metrics.values())


def test_update_is_adamw_on_the_clipped_mean_gradient(tokenizer):
    model = make_model()
    groups = group_batch(model, GRPOConfig())
    plain = clone(model)
    settings = {"max_grad_norm": 0.01, "weight_decay": 0.1, "adam_beta2": 0.99}
    trainer = _trainer(model, tokenizer, **settings)
    partial = trainer.accumulate(groups)
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        a.grad = b.grad / partial.normaliser
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    matrices = [p for p in plain.parameters() if p.ndim > 1]
    vectors = [p for p in plain.parameters() if p.ndim == 1]
    torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.99),
        weight_decay=0.1,
    ).step()
    update = trainer.apply(partial)
    assert update.grad_norm == pytest.approx(float(norm), rel=1e-5)
    assert float(norm) > 0.01
    for (name, wanted), found in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4, msg=name)
    assert not _gradient(trainer).any()


def test_weights_change_in_place(tokenizer):
    model = make_model()
    layer = model.model.layers[0].self_attn
    fused = torch.cat([layer.q_proj.weight.data, layer.k_proj.weight.data])
    layer.q_proj.weight.data = fused[: len(layer.q_proj.weight)]
    layer.k_proj.weight.data = fused[len(layer.q_proj.weight) :]
    before = fused.clone()
    trainer = _trainer(model, tokenizer)
    trainer.apply(trainer.accumulate(group_batch(model, GRPOConfig())))
    assert trainer.shares_weights
    assert (fused != before).all(dim=1).all()
    live = dict(trainer.weights())["model.layers.0.self_attn.k_proj.weight"]
    assert live.data_ptr() == fused[len(layer.q_proj.weight) :].data_ptr()


def test_gradient_checkpointing_and_temperature(tokenizer):
    model = make_model()
    groups = group_batch(model, GRPOConfig(), temperature=0.5)
    config = TrainConfig(gradient_checkpointing=True)
    one = Trainer(clone(model), tokenizer, config, temperature=0.5)
    two = Trainer(clone(model), tokenizer, TrainConfig(), temperature=0.5)
    three = Trainer(clone(model), tokenizer, TrainConfig(), temperature=1.0)
    partials = [t.accumulate(groups) for t in (one, two, three)]
    assert torch.equal(_gradient(one), _gradient(two))
    metrics = [t.apply(p).metrics for t, p in zip((one, two, three), partials, strict=True)]
    assert metrics[1]["trained_tokens/abs_logprob_difference"] < 1e-5
    assert metrics[2]["trained_tokens/abs_logprob_difference"] > 0.1


def test_nan_is_skipped_reported_and_stops_the_run_when_it_stays(tokenizer):
    model = make_model()
    groups = group_batch(model, GRPOConfig())
    trainer = _trainer(model, tokenizer)
    partial = trainer.accumulate(groups)
    before = _weights(trainer)
    trainer._optimizer.sums[3] = float("nan")
    update = trainer.apply(partial)
    assert not update.applied
    assert math.isnan(update.grad_norm)
    _assert_same(before, _weights(trainer))
    assert trainer.apply(trainer.accumulate(groups)).applied
    infinite = Partial(normaliser=1.0, tokens=1, sums={"loss": float("inf")})
    assert [trainer.apply(infinite).skipped for _ in range(2)] == [1, 2]


@pytest.mark.parametrize(
    ("rank", "dtype"),
    [
        (0, torch.float32),
        pytest.param(0, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(4, torch.float32, marks=pytest.mark.slow),
        (4, torch.bfloat16),
    ],
)
def test_a_loaded_trainer_continues_bit_for_bit(dtype, rank, tokenizer, tmp_path):
    model = make_model().to(dtype)
    groups = group_batch(model, GRPOConfig())
    lora = ModelConfig(path=".", lora_rank=rank)
    settings = {"lora": lora, "lr_scheduler_type": "linear", "warmup_steps": 2}
    settings |= {"total_updates": 9, "beta": 0.01}
    trainer = _trainer(clone(model), tokenizer, **settings)
    for _ in range(2):
        trainer.apply(trainer.accumulate(groups))
    trainer.accumulate(groups[:1])
    trainer.save(tmp_path)
    trainer.discard()
    other = _trainer(clone(model), tokenizer, **settings)
    other.accumulate(groups[:1])
    other.load(tmp_path)
    _assert_same(_weights(trainer), _weights(other))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert saved.dtype == dtype
    _assert_same(dict(saved.named_parameters()), _weights(trainer))
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token_id == 1
    assert (tmp_path / "adapter" / "adapter_config.json").exists() == (rank > 0)
    for _ in range(2):
        one, two = (t.apply(t.accumulate(groups)) for t in (trainer, other))
        assert one == two
    _assert_same(_weights(trainer), _weights(other))


def test_loading_another_model_is_refused_by_name(tokenizer, tmp_path):
    trainer = _trainer(make_model("qwen2"), tokenizer)
    trainer.save(tmp_path)
    with pytest.raises(ValueError, match=r"model_type=qwen2.* trainer has model_type=llama"):
        _trainer(make_model("llama"), tokenizer).load(tmp_path)
    with pytest.raises(ValueError, match=r"hidden_size=32.*hidden_size=64"):
        _trainer(make_model(hidden_size=64), tokenizer).load(tmp_path)
    lora = ModelConfig(path=".", lora_rank=2)
    with pytest.raises(ValueError, match="lora_rank"):
        _trainer(make_model(), tokenizer, lora=lora).load(tmp_path)


def test_bfloat16_weights_follow_float32_masters(tokenizer):
    model = make_model().to(torch.bfloat16)
    groups = group_batch(model, GRPOConfig())
    wide = _trainer(clone(model).float(), tokenizer)
    expected = wide.accumulate(groups)
    trainer = _trainer(model, tokenizer, learning_rate=1e-5)
    partial = trainer.accumulate(groups)
    assert all(p.grad is None for p in model.parameters())
    assert partial.normaliser == expected.normaliser
    a, b = _gradient(trainer), _gradient(wide)
    assert torch.dot(a, b) / (a.norm() * b.norm()) > 0.98
    # Steps too small for bfloat16 add up in the masters.
    first = _weights(trainer)
    masters = [m.clone() for m in trainer._optimizer.state()["master"].values()]
    for _ in range(5):
        trainer.apply(trainer.accumulate(groups))
    after = trainer._optimizer.state()["master"]
    for old, (name, new) in zip(masters, after.items(), strict=True):
        moved = (new - old).abs().max()
        assert 2e-5 < moved < 6e-5
        assert torch.equal(new.to(torch.bfloat16), dict(trainer.weights())[name])
    same = np.mean([float((w == first[n]).float().mean()) for n, w in trainer.weights()])
    assert same > 0.5


def test_lora_trains_adapters_only_and_yields_merged_weights(tokenizer):
    model = make_model()
    base = {n: p.detach().clone() for n, p in model.named_parameters()}
    plain = clone(model)
    groups = group_batch(model, GRPOConfig())
    trainer = _trainer(model, tokenizer, lora=ModelConfig(path=".", lora_rank=4))
    assert not trainer.shares_weights
    _assert_same(_weights(trainer), base)
    for _ in range(3):
        trainer.apply(trainer.accumulate(groups))
    merged = _weights(trainer)
    changed = {n for n in base if not torch.equal(base[n], merged[n])}
    assert changed == {n for n in base if "_proj.weight" in n}
    plain.load_state_dict(merged, strict=False)
    follow = _trainer(plain, tokenizer)
    one = trainer.accumulate(groups).sums["entropy"]
    assert follow.accumulate(groups).sums["entropy"] == pytest.approx(one, rel=1e-5)


def test_reference_is_the_first_weights(tokenizer):
    model = make_model()
    groups = group_batch(model, GRPOConfig())
    for lora in (None, ModelConfig(path=".", lora_rank=4)):
        trainer = _trainer(clone(model), tokenizer, beta=0.5, lora=lora, learning_rate=0.1)
        pointers = [p.data_ptr() for p in trainer._model.parameters()]
        first = trainer.apply(trainer.accumulate(groups)).metrics["kl"]
        second = trainer.apply(trainer.accumulate(groups)).metrics["kl"]
        assert first == pytest.approx(0.0, abs=1e-6)
        assert second > 1e-3
        assert pointers == [p.data_ptr() for p in trainer._model.parameters()]


def test_scores_are_the_logprobs_of_the_weights_in_place(tokenizer):
    model = make_model()
    groups = group_batch(model, GRPOConfig(), off=0.5)
    scores = _trainer(model, tokenizer).score(groups)
    assert len(scores) == sum(len(g.samples) for g in groups[:-1])  # the last has no advantage
    for group in groups[:-1]:
        for sample in group.samples:
            with torch.no_grad():
                wanted = naive_logprobs(model, sample.prompt_tokens, sample.tokens).numpy()
            found = scores[sample.prompt, sample.index]
            np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert _trainer(model, tokenizer).score(groups[-1:]) == {}
    assert len(_trainer(make_model(), tokenizer, beta=0.1).score(groups)) == 20


def _cut_off(groups):
    """The same, every second response of each group cut off."""
    return [
        replace(
            g,
            samples=tuple(
                replace(s, finish_reason="length" if s.index % 2 else "stop") for s in g.samples
            ),
        )
        for g in groups
    ]


def test_masked_responses_have_no_tokens_in_the_loss_but_count_as_responses(tokenizer):
    model = make_model()
    groups = _cut_off(group_batch(model, GRPOConfig()))
    ended = [replace(g, samples=g.samples[::2], advantages=g.advantages[::2]) for g in groups]
    for config, samples in ((GRPOConfig(), 0), (CONFIGS["gspo"], 20), (CONFIGS["dr_grpo"], 20)):
        settings = {"algorithm": config, "beta": 0.1}
        masked = _trainer(clone(model), tokenizer, **settings, mask_truncated_completions=True)
        plain = _trainer(clone(model), tokenizer, **settings)
        one, two = masked.accumulate(groups), plain.accumulate(ended)
        difference = _gradient(masked) - _gradient(plain)
        assert difference.norm() / _gradient(plain).norm() < 1e-5
        assert (one.tokens, one.samples) == (two.tokens, 20)
        assert one.normaliser == (2 * two.normaliser if samples else two.normaliser)
    nothing = [replace(g, samples=g.samples[1::2], advantages=g.advantages[1::2]) for g in groups]
    empty = masked.apply(
        _trainer(model, tokenizer, mask_truncated_completions=True).accumulate(nothing)
    )
    assert empty.metrics["loss"] == 0.0


def test_kl_bias_correction_changes_the_gradient_on_policy_too(tokenizer):
    groups = group_batch(make_model(), GRPOConfig())
    found = []
    for corrected in (True, False):
        trainer = _trainer(make_model(), tokenizer, beta=5.0, kl_bias_correction=corrected)
        trainer.apply(trainer.accumulate(groups))  # away from the reference
        partial = trainer.accumulate(groups)
        found.append((_gradient(trainer), partial.sums["kl"]))
    assert (found[0][0] - found[1][0]).norm() > 0.01 * found[1][0].norm()


@pytest.mark.parametrize(
    ("zero", "expected"), [(False, [0.2, 0.4, 0.6, 0.8, 1.0]), (True, [0.0, 0.25, 0.5, 0.75, 1.0])]
)
def test_warm_up_begins_above_zero_or_as_transformers_does(zero, expected):
    config = TrainConfig(learning_rate=1.0, warmup_steps=4, warmup_from_zero=zero)
    assert [learning_rate(config, u, 0) for u in range(5)] == pytest.approx(expected)
    if zero:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        theirs = get_constant_schedule_with_warmup(optimizer, 4)
        assert theirs.lr_lambdas[0](1) == expected[1]


def test_missing_numbers_are_named(tokenizer):
    with pytest.raises(ValueError, match="lr_scheduler_type=cosine"):
        _trainer(make_model(), tokenizer, lr_scheduler_type="cosine")
    config = TrainConfig(algorithm=CONFIGS["dr_grpo"])
    with pytest.raises(ValueError, match="max_completion_length"):
        Trainer(make_model(), tokenizer, config, temperature=1.0)
