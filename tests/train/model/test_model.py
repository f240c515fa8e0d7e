"""Loading models, and the one-line errors for what cannot be loaded; learning rates."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import FAMILIES, make_model
from transformers import GenerationConfig

from rollpacker.config import (
    MiniEngineConfig,
    ModelConfig,
    RolloutConfig,
    TrainConfig,
    VllmEngineConfig,
    parse,
)
from rollpacker.engine.mini import MiniEngine
from rollpacker.train.configured import build_trainer
from rollpacker.train.model.loading import (
    NEUTRAL,
    OURS,
    load_model,
    notes,
    read_card,
    require_chat_template,
)
from rollpacker.train.state.optimizer import learning_rate

HARMLESS = {
    *("_from_model_config", "assistant_confidence_threshold", "assistant_early_exit"),
    *("assistant_ensemble_weight", "assistant_lookbehind", "bos_token_id", "cache_config"),
    *("cache_implementation", "compile_config", "continuous_batching_config", "do_sample"),
    *("decoder_start_token_id", "disable_compile", "early_stopping", "eos_token_id"),
    *("is_assistant", "length_penalty", "low_memory", "max_cache_len", "max_length"),
    *("max_matching_ngram_size", "max_new_tokens", "num_assistant_tokens", "diversity_penalty"),
    *("num_assistant_tokens_schedule", "num_beam_groups", "num_return_sequences"),
    *("output_attentions", "output_hidden_states", "output_logits", "output_scores"),
    *("pad_token_id", "prefill_chunk_size", "prompt_lookup_num_tokens", "remove_invalid_values"),
    *("renormalize_logits", "return_dict_in_generate", "speculation_type", "target_lookbehind"),
    *("transformers_version", "use_cache", "use_mtp"),
}
"""Of a generation configuration: how it is computed, of several beams only, lengths that the run
sets, ends that are stop tokens."""


@pytest.fixture
def folder(tmp_path, tokenizer):
    make_model().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def _edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoints_of_every_family_load(family, dtype, tmp_path, tokenizer):
    original = make_model(family)
    original.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, loaded = load_model(ModelConfig(path=str(tmp_path), dtype=dtype), "cpu")
    assert not model.training
    assert model.dtype == getattr(torch, dtype)
    assert loaded.convert_tokens_to_ids("w5") == 5
    for name, weight in model.named_parameters():
        expected = original.get_parameter(name).to(model.dtype)
        assert torch.equal(weight, expected), name


def test_stop_ids_are_those_of_generation_config_model_and_tokenizer(tmp_path, tokenizer):
    model = make_model("qwen2")
    tokenizer.save_pretrained(tmp_path)
    for ids, expected in ((1, (1,)), ([4, 2], (1, 2, 4)), (None, (1,))):
        model.generation_config.eos_token_id = ids
        model.save_pretrained(tmp_path)
        assert read_card(ModelConfig(path=str(tmp_path))).stop_token_ids == expected


def test_what_is_not_applied_of_the_generation_config_is_said(folder):
    generation = {"no_repeat_ngram_size": 2, "suppress_tokens": [5], "bad_words_ids": None}
    own = {"temperature": 0.6, "top_p": 1.0, "repetition_penalty": 1.0, "eos_token_id": [1, 4]}
    (folder / "generation_config.json").write_text(json.dumps(generation | own))
    card = read_card(ModelConfig(path=str(folder)))
    assert card.stop_token_ids == (1, 4)
    warning, sampled = notes(card.generation, RolloutConfig())
    assert "WARNING model.path: its generation_config.json asks for no_repeat_ngram_size=2, " in (
        warning
    )
    assert "suppress_tokens=[5]" in warning
    assert "repetition_penalty" not in warning
    assert sampled == (
        "sampling with rollout.temperature=1.0 (the model's generation_config.json has "
        "temperature=0.6)"
    )
    (folder / "generation_config.json").unlink()
    assert notes(read_card(ModelConfig(path=str(folder))).generation, RolloutConfig()) == []


def test_every_key_of_transformers_is_either_known_or_changes_no_sample():
    """A key of a newer release is looked at before it is dropped."""
    keys = set(GenerationConfig().to_dict())
    assert keys - set(NEUTRAL) - set(OURS) <= HARMLESS


def _error(path, **options):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        load_model(ModelConfig(path=str(path), **options), "cpu")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"model.path={path}: ")
    return message


def test_what_cannot_be_loaded_is_named_in_one_line(folder, tmp_path):
    assert "no such folder" in _error(tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no config.json" in _error(empty)
    assert "chat template" in _error(folder, chat_template_kwargs={"thinking": True})
    _edit(folder, model_type="t5")
    assert "t5 models are not causal language models" in _error(folder)
    _edit(folder, model_type="no_such_model")
    _error(folder)
    (folder / "config.json").write_text("{")
    _error(folder)


@pytest.mark.parametrize("whole", [False, True], ids=["alone", "beside a model"])
def test_adapters_are_no_model(whole, folder, tmp_path):
    """transformers puts those that lie beside a model on it, frozen; they would be trained over."""
    adapted = get_peft_model(make_model(), LoraConfig(target_modules=["q_proj"]))
    place = folder if whole else tmp_path / "adapter"
    adapted.save_pretrained(str(place))
    assert "holds adapters, not a whole model" in _error(place)


def test_what_cannot_be_trained_is_named_before_it_is_loaded(folder):
    """No weights are there, and nobody is asked whether foreign code may run."""
    (folder / "model.safetensors").unlink()
    _edit(folder, quantization_config={"quant_method": "fp8"})
    assert "quantized weights (fp8, quantization_config) cannot be trained" in _error(folder)
    _edit(folder, model_type="own", auto_map={"AutoConfig": "own.Config"})
    assert "it needs its own code (auto_map), which rollpacker does not run" in _error(folder)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_head_of_its_own_that_the_configuration_ties(family, rank, tmp_path, tokenizer):
    """The weights decide: the engine has it, and checkpoints say so."""
    model = make_model(family)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    _edit(tmp_path, tie_word_embeddings=True)
    config = {"model": {"path": str(tmp_path), "lora_rank": rank}, "data": {"path": "d"}}
    config = parse(config | {"rewards": [{"function": "math"}]})
    decoded, trained = (load_model(config.model, "cpu")[0] for _ in range(2))
    given = {"max_length": 8, "total_updates": 1}
    trainer = build_trainer(config, trained, tokenizer, **given)
    engine = MiniEngine(decoded, config=MiniEngineConfig(max_running=2, kv_tokens=64))
    engine.load_weights(trainer.weights(), 1)
    assert torch.equal(decoded.lm_head.weight, model.lm_head.weight)
    trainer.save(tmp_path / "checkpoint")
    written = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    assert written["tie_word_embeddings"] is False
    again, _ = load_model(ModelConfig(path=str(tmp_path / "checkpoint")), "cpu")
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    with pytest.raises(ValueError, match=r"vLLM would drop it: set tie_word_embeddings to false"):
        build_trainer(
            config.model_copy(update={"engine": VllmEngineConfig()}), trained, tokenizer, **given
        )


@pytest.mark.parametrize(
    ("file", "words"),
    [("tokenizer.json", "no tokenizer"), ("model.safetensors", "model.safetensors")],
)
def test_a_missing_file_is_named(folder, file, words):
    (folder / file).unlink()
    assert words in _error(folder)


def test_positions_that_change_with_the_longest_sequence_are_refused(folder):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    _edit(folder, rope_parameters=rope | {"original_max_position_embeddings": 64})
    assert "set max_position_embeddings to 64 in its config.json" in _error(folder)
    _edit(folder, max_position_embeddings=64)
    load_model(ModelConfig(path=str(folder)), "cpu")


def test_chat_template_is_required_only_where_asked(folder):
    _, tokenizer = load_model(ModelConfig(path=str(folder)), "cpu")
    with pytest.raises(ValueError, match=r"data\.chat=false"):
        require_chat_template(tokenizer, "x")
    tokenizer.chat_template = "{{ messages }}"
    require_chat_template(tokenizer, "x")


def test_learning_rates():
    def rates(kind, total=10):
        config = TrainConfig(learning_rate=1.0, lr_scheduler_type=kind, warmup_steps=3)
        return [learning_rate(config, u, total) for u in range(total)]

    for kind in ("constant", "linear", "cosine"):
        assert rates(kind)[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates("constant")[4:] == [1.0] * 6
    assert rates("linear")[4:] == pytest.approx([6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7])
    cosine = rates("cosine", 11)
    assert cosine[7] == pytest.approx(0.5)
    assert cosine == sorted(cosine[:4]) + sorted(cosine[4:], reverse=True)
    config = TrainConfig(learning_rate=1.0, lr_scheduler_type="linear", warmup_steps=3)
    assert learning_rate(config, 50, 10) == 0.0
