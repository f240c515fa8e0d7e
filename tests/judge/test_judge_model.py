"""The judge with a tiny real model."""

import json
import math

import pytest
import torch
from judge_models import request, save_judge
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollpacker.reward.base import GradingError
from rollpacker.reward.judge.judge import Judge
from rollpacker.reward.judge.model import difference_score, greedy, measure
from rollpacker.reward.judge.options import JudgeOptions
from rollpacker.reward.judge.streamed import StreamedModel, WholeModel

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
