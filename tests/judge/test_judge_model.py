"""The judge with a tiny real model, whole and layer by layer."""

import copy
import json
import math

import pytest
import torch
from judge_models import request, save_judge
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from rollpacker.reward.base import GradingError
from rollpacker.reward.judge.judge import Judge
from rollpacker.reward.judge.model import difference_score, greedy, measure
from rollpacker.reward.judge.options import JudgeOptions
from rollpacker.reward.judge.streamed import StreamedModel, WholeModel, spread

CPU = torch.device("cpu")
TEMPLATE = "Q {prompt} R {reference} A {completion} G"
ANSWERS = ("two", "2", "it is 2, of course", "3")
REQUESTS = [request(i, text) for i, text in enumerate(ANSWERS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_judge(tmp_path_factory.mktemp("judge"))


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def judge_of(folder, **options) -> Judge:
    return Judge(JudgeOptions(**{"model": str(folder), "template": TEMPLATE} | options))


def test_scores_are_the_sigmoid_of_the_models_own_logits(folder):
    model, tokenizer = load(folder)
    yes, no = tokenizer("Y")["input_ids"][0], tokenizer("N")["input_ids"][0]
    expected = []
    for text in ANSWERS:
        ids = tokenizer(f"Q 1+1? R 2 A {text} G", return_tensors="pt").input_ids
        with torch.no_grad():
            logits = model(ids).logits[0, -1]
        expected.append(1 / (1 + math.exp(-(logits[yes] - logits[no]).item())))
    assert max(expected) - min(expected) > 0.01
    for options in (
        {},
        {"resident": "all"},
        {"resident": 0},
        {"resident": 2, "batch_tokens": 1},
        {"memory_gb": 1.0},
    ):
        scores = judge_of(folder, yes="Y", no="N", **options).grade(REQUESTS)
        assert scores == pytest.approx(expected, abs=1e-5)


def test_difference_scores():
    sigmoid = JudgeOptions(threshold=2.0)
    assert difference_score(2.0, sigmoid) == 0.5
    assert difference_score(3.0, sigmoid) == pytest.approx(1 / (1 + math.exp(-1)))
    assert difference_score(-1e5, sigmoid) == 0.0
    assert difference_score(math.nan, sigmoid) is None
    threshold = JudgeOptions(score="threshold", threshold=2.0)
    assert [difference_score(d, threshold) for d in (1.9, 2.0, 2.1)] == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("resident", [0, 1, 3])
def test_greedy_text_equals_transformers_generate(folder, resident):
    model, tokenizer = load(folder)
    prompts = [tokenizer(text)["input_ids"] for text in ("ab", "hello there", "1+1=", "z")]
    expected = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=20,
        )[0, len(prompt) :].tolist()
        expected.append(out[: out.index(1)] if 1 in out else out)
    streamed = StreamedModel(load(folder)[0], CPU)
    streamed.keep(resident)
    for judge in (streamed, WholeModel(model, CPU)):
        assert greedy(judge, prompts, stop={1}, max_new_tokens=20) == expected
        stop = {expected[0][3], 1}
        cut = greedy(judge, prompts, stop=stop, max_new_tokens=20)
        assert cut[0] == expected[0][: expected[0].index(expected[0][3])]


def test_generate_mode_parses_the_models_text(folder):
    model, tokenizer = load(folder)
    texts = []
    for text in ANSWERS:
        ids = tokenizer(f"Q 1+1? R 2 A {text} G", return_tensors="pt").input_ids
        out = model.generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :]
        texts.append(tokenizer.decode(out, skip_special_tokens=True))
    last = texts[0][-1]
    # Each text's length, where it holds the last character of the first one.
    judge = judge_of(folder, mode="generate", parser="regex:(\\d)", max_new_tokens=8)
    judge._asker._parse = lambda text: len(text) / 100 if last in text else None
    outcomes = judge.outcomes(REQUESTS)
    expected = [len(text) / 100 if last in text else None for text in texts]
    assert expected[0] is not None
    assert [None if isinstance(o, GradingError) else o for o in outcomes] == expected


def test_numbers_are_measured(folder):
    model = StreamedModel(load(folder)[0], CPU)
    layer = load(folder)[0].model.layers[0]
    exact = sum(p.numel() * p.element_size() for p in layer.parameters())
    short, cached = measure(model, cached=False), measure(model, cached=True)
    assert exact <= short.layer_bytes <= exact + 256 * 9
    assert short.layers == 3
    assert cached.token_bytes - short.token_bytes == 2 * 3 * 2 * 8 * 4
    assert 0 < short.copy_seconds < 1
    assert 0 < short.token_seconds < 1


def test_a_long_prompt_is_cut_to_the_context(folder):
    judge = judge_of(folder, overlong="tail", yes="Y", no="N")
    (score,) = judge.grade([request(1, "abcdefgh" * 200)])
    assert 0.0 <= score <= 1.0
    with pytest.raises(GradingError, match="tokens too long"):
        judge_of(folder, yes="Y", no="N").grade([request(1, "abcdefgh" * 200)])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"model": "/no/such/folder"}, "there is no such folder"),
        ({"yes": "same", "no": "sorry"}, "do not begin with different tokens"),
        ({"chat": True}, "no chat template"),
        ({"device": "cuda"}, "no CUDA device"),
    ],
)
def test_unusable_models_are_refused(folder, options, problem):
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match=problem):
        judge_of(folder, **options)


def test_a_folder_without_a_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="judge: model="):
        judge_of(tmp_path)


LAYERS = 4
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "llama_tied": LlamaConfig(**SHAPE, tie_word_embeddings=True, attention_bias=True),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2_sliding": Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=6, max_window_layers=2
    ),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
    "mistral": MistralConfig(**SHAPE, head_dim=8, sliding_window=5),
}
LENGTHS = (11, 3, 7, 1)


def tiny(name: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    with torch.no_grad():  # biases and norms start as constants, which would hide a mix-up
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def batch(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask of the same texts, padded on one side."""
    torch.manual_seed(1)
    texts = [torch.randint(3, 61, (length,)) for length in LENGTHS]
    pad = {"batch_first": True, "padding_side": side}
    ids = torch.nn.utils.rnn.pad_sequence(texts, **pad)
    return ids, torch.nn.utils.rnn.pad_sequence([torch.ones_like(t) for t in texts], **pad)


def alone(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Next-token logits of each row, without padding and without a batch."""
    with torch.no_grad():
        rows = [model(input_ids=r[m.bool()][None]).logits[0, -1] for r, m in zip(ids, mask)]  # noqa: B905
    return torch.stack(rows)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_the_unmodified_models_for_every_number_of_resident_layers(name):
    model = tiny(name)
    streamed = StreamedModel(copy.deepcopy(model), CPU)
    (right, right_mask), (left, left_mask) = batch("right"), batch("left")
    expected = alone(model, right, right_mask)
    at = torch.tensor(LENGTHS) - 1
    for resident in [*range(LAYERS + 1), 2, 0, LAYERS]:
        streamed.keep(resident)
        for _ in range(2):
            torch.testing.assert_close(streamed.logits(right, at), expected)
            last = torch.full_like(at, left.shape[1] - 1)
            torch.testing.assert_close(streamed.logits(left, last, left_mask), expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_all_hidden_states_equal_the_models_own(name):
    model = tiny(name)
    streamed = StreamedModel(copy.deepcopy(model), CPU)
    ids, mask = batch("left")
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        expected = model(ids, attention_mask=mask, position_ids=positions).logits
    got = streamed._head(streamed._norm(streamed.hidden(ids, mask)))
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_cache_gives_the_logits_of_the_whole_text(name):
    model = tiny(name)
    streamed = StreamedModel(copy.deepcopy(model), CPU)
    streamed.keep(1)
    ids, mask = batch("left")
    expected = alone(model, ids, mask)
    cache = DynamicCache(config=streamed.config)
    cut = ids.shape[1] - 1
    streamed.logits(ids[:, :cut], torch.full((len(ids),), cut - 1), mask[:, :cut], cache)
    got = streamed.logits(ids[:, cut:], torch.zeros(len(ids), dtype=torch.long), mask, cache)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_whole_model_has_the_same_interface(name):
    model = tiny(name)
    ids, mask = batch("right")
    at = torch.tensor(LENGTHS) - 1
    got = WholeModel(copy.deepcopy(model), CPU).logits(ids, at)
    torch.testing.assert_close(got, alone(model, ids, mask))


def test_memory_is_the_resident_layers_and_two_buffers():
    streamed = StreamedModel(tiny("llama"), CPU)
    layer = streamed.store.layer_bytes
    held = []
    for resident in range(LAYERS + 1):
        streamed.keep(resident)
        held.append(streamed.store.held_bytes / layer)
    assert held == [min(LAYERS, resident + 2) for resident in range(LAYERS + 1)]


def test_the_layers_own_memory_is_given_up():
    model = tiny("llama")
    StreamedModel(model, CPU)
    devices = {p.device.type for p in model.model.layers.parameters()}
    assert devices == {"meta"}


def test_a_pass_that_broke_off_does_not_spoil_the_next(monkeypatch):
    model = tiny("qwen2")
    streamed = StreamedModel(copy.deepcopy(model), CPU)
    ids, mask = batch("right")
    at = torch.tensor(LENGTHS) - 1
    for stop in range(LAYERS):
        streamed.store.begin()
        for layer in range(stop):
            with streamed.store.weights(layer):
                pass
        torch.testing.assert_close(streamed.logits(ids, at), alone(model, ids, mask))


def test_copies_go_ahead_of_their_use():
    streamed = StreamedModel(tiny("llama"), CPU)
    streamed.keep(1)
    store, copied = streamed.store, []
    copy_layer = store._copy
    store._copy = lambda layer, buffer: (copied.append(layer), copy_layer(layer, buffer))
    store.begin()
    ahead = {}
    for _ in range(2):
        for layer in range(LAYERS):
            with store.weights(layer):
                ahead[layer] = list(copied)
    streamed_layers = [layer for layer in range(LAYERS) if layer != spread(LAYERS)[0]]
    for layer in streamed_layers:
        following = streamed_layers[(streamed_layers.index(layer) + 1) % len(streamed_layers)]
        assert following in ahead[layer][-2:]
    assert copied == (streamed_layers * 3)[: len(copied)]


@pytest.mark.parametrize("layers", [1, 2, 3, 7, 24, 30, 36])
def test_resident_layers_are_spread(layers):
    order = spread(layers)
    assert sorted(order) == list(range(layers))
    for count in range(1, layers + 1):
        chosen = sorted(order[:count])
        gaps = [b - a for a, b in zip(chosen, [*chosen[1:], chosen[0] + layers])]  # noqa: B905
        assert max(gaps) <= 2 * -(-layers // count) + 1


def test_other_architectures_are_refused():
    from transformers import GPT2Config

    model = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=8, n_head=1))
    with pytest.raises(ValueError, match=r"gpt2 models cannot be streamed.*resident: all"):
        StreamedModel(model, CPU)
