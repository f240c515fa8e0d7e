"""Our seeds in vLLM's second model runner, by its own classes on a CPU, all but its kernels; and
what is said where vLLM calls something otherwise."""

from importlib import import_module

import numpy as np
import pytest
import torch
from engine_models import build, prompt, request

from rollpacker import config
from rollpacker.engine.base import uniforms
from rollpacker.engine.configured import build_engine
from rollpacker.engine.sampling.single import draw_token

pytestmark = pytest.mark.cluster

VOCABULARY, SLOTS, LONGEST = 600, 8, 5
PARAMS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.0},
]


@pytest.fixture(scope="module", autouse=True)
def imported():
    """What vLLM reads as it is imported."""
    import rollpacker.engine.vllm  # noqa: F401


@pytest.fixture
def sampler():
    """Its sampler, with a processor of ours that its loader has made."""
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.sample.logits_processor import build_custom_logits_processors
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    from rollpacker.engine.vllm.second_runner import SeededRows

    device = torch.device("cpu")
    states = RequestState(SLOTS, 256, 256, LONGEST, VOCABULARY, device)
    settings = VllmConfig()
    custom = build_custom_logits_processors(settings, states, False, [SeededRows])
    return Sampler(settings, SLOTS, VOCABULARY, device, states, custom_logits_processors=custom)


def attempt(seed, told=0, **params):
    from rollpacker.engine.vllm.sampling import VllmAttempt

    return VllmAttempt(
        request(seed, prompt(4), seed=seed, **params), str(seed), [3] * told, [], None
    )


def admit(sampler, slots, rows):
    """As the engine does, ``None`` for a request of vLLM's own."""
    from vllm import SamplingParams

    for slot, row in zip(slots, rows, strict=True):
        extra = None if row is None else {"row": row}
        sampler.add_request(slot, SamplingParams(temperature=0.0, extra_args=extra))
    sampler.apply_staged_writes()


def run(sampler, slots, logits, drafts):
    """What verification is given for a step, drafts behind a token that was sampled before."""
    counts = torch.tensor([1 + len(draft) for draft in drafts])
    slots = torch.tensor(slots)
    fed = torch.tensor([token for draft in drafts for token in (7, *draft)])
    offsets = torch.cat([torch.arange(count) for count in counts.tolist()])
    expanded = slots.repeat_interleave(counts)
    lengths = np.zeros(len(slots), np.int32)
    return sampler.apply_sampling_params(
        logits, expanded, slots, slots.numpy(), offsets, fed, offsets, lengths
    )


def draws(row, logits):
    """Token by token, what comes next at each of these rows."""
    told = len(row.tokens)
    numbers = uniforms(row.request.seed, 0, told + len(logits))[told:]
    p = row.request.params
    return [
        draw_token(each, p.temperature, p.top_k, p.top_p, number)
        for each, number in zip(logits.numpy(), numbers, strict=True)
    ]


def kept(logits, draft):
    """What ``_rejection_kernel`` keeps at temperature 0, and the token behind it."""
    argmax = logits.argmax(-1).tolist()
    right = 0
    while right < len(draft) and draft[right] >= 0 and argmax[right] == draft[right]:
        right += 1
    return argmax[: right + 1]


def test_its_loader_takes_ours(sampler):
    from vllm.v1.worker.gpu.sample.logits_processor import (
        LogitsProcessor,
        build_custom_logits_processors_params_validator,
    )

    from rollpacker.engine.vllm.second_runner import SeededRows

    assert issubclass(SeededRows, LogitsProcessor)
    name = f"{SeededRows.__module__}:{SeededRows.__name__}"
    build_custom_logits_processors_params_validator([name])
    assert isinstance(sampler.logits_processors[-1], SeededRows)


@pytest.mark.parametrize("told", [0, 62, 64])
def test_each_row_is_drawn_as_without_drafts(sampler, told):
    rows = [attempt(seed, told, **params) for seed, params in enumerate(PARAMS)]
    slots = [5, 0, 3, 6]
    admit(sampler, slots, rows)
    lengths = [3, 0, LONGEST, 1]
    logits = torch.randn(
        sum(lengths) + 4, VOCABULARY, generator=torch.Generator().manual_seed(told)
    )
    parts = logits.split([1 + length for length in lengths])
    wanted = [draws(row, part) for row, part in zip(rows, parts, strict=True)]
    told_right = [[token for token, _ in those[:-1]] for those in wanted]
    out = run(sampler, slots, logits.clone(), told_right)
    assert out.sum(-1).eq(1).all()
    assert out.count_nonzero(-1).eq(1).all()
    assert out.argmax(-1).tolist() == [token for those in wanted for token, _ in those]
    for row, those in zip(rows, wanted, strict=True):
        assert [token for token, _ in row.drawn] == [token for token, _ in those]
        np.testing.assert_allclose([p for _, p in row.drawn], [p for _, p in those], atol=1e-5)


def test_what_it_keeps_is_what_comes_without_drafts(sampler):
    """Drafts that are right, wrong from some place on, wrong altogether, and placeholders."""
    random = np.random.default_rng(0)
    for trial in range(20):
        rows = [attempt(10 * trial + n, trial, **params) for n, params in enumerate(PARAMS)]
        slots = random.permutation(SLOTS)[:4].tolist()
        admit(sampler, slots, rows)
        lengths = random.integers(0, LONGEST + 1, 4)
        logits = torch.from_numpy(random.normal(size=(lengths.sum() + 4, VOCABULARY))).float()
        parts = logits.split((1 + lengths).tolist())
        wanted = [draws(row, part) for row, part in zip(rows, parts, strict=True)]
        drafts = [[token for token, _ in those[:-1]] for those in wanted]
        right = [len(draft) for draft in drafts]
        for n, draft in enumerate(drafts):
            if draft and random.random() < 0.7:
                right[n] = int(random.integers(len(draft)))
                wrong = (draft[right[n]] + 1) % VOCABULARY
                draft[right[n]] = -1 if random.random() < 0.2 else wrong
        out = run(sampler, slots, logits.clone(), drafts).split((1 + lengths).tolist())
        for n, row in enumerate(rows):
            found = [token for token, _ in wanted[n][: right[n] + 1]]
            assert kept(out[n], drafts[n]) == found
            assert [token for token, _ in row.drawn] == found
            count = (1, len(drafts[n]), right[n]) if drafts[n] else (0, 0, 0)
            assert tuple(row.drafts) == count


def test_requests_of_its_own_keep_their_logits(sampler):
    """Also in a slot that one of ours has left."""
    old, row = attempt(0), attempt(1)
    admit(sampler, [2, 4], [old, row])
    admit(sampler, [2], [None])
    logits = torch.randn(5, VOCABULARY)
    (first, *_), _ = wanted = draws(row, logits[2:4])
    out = run(sampler, [2, 4, 1], logits.clone(), [[9], [first], []])
    assert torch.equal(out[[0, 1, 4]], logits[[0, 1, 4]])
    assert out[2:4].argmax(-1).tolist() == [token for token, _ in wanted]
    assert not old.drawn


OFF = ", or set rollout.speculation.mode=off: only drafts need it"


def test_a_layout_that_is_called_otherwise(monkeypatch, sampler):
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext

    from rollpacker.engine.vllm.second_runner import SeededRows

    monkeypatch.delitem(LogitsContext.__dataclass_fields__, "input_ids")
    with pytest.raises(ValueError, match="no input_ids in its second model runner's rows: install"):
        SeededRows(None, None)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("wide")
    build("wide").config.save_pretrained(path)

    def made(speculation="auto"):
        run = config.parse(
            {
                "model": {"path": str(path)},
                "data": {"path": "d"},
                "rewards": [{"function": "math"}],
                "engine": {"kind": "vllm", "kv_tokens": 256},
                "rollout": {"speculation": {"mode": speculation}},
            }
        )
        return build_engine(run, None, None)

    return made


@pytest.fixture
def without(monkeypatch):
    """vLLM, one of whose classes lacks a name, or leaves it out of what it makes."""

    def without(where, name):
        module, _, kind = where.rpartition(".")
        lacking = getattr(import_module(f"vllm.v1.{module}"), kind)
        if name in vars(lacking):
            monkeypatch.delattr(lacking, name)
            return
        make = lacking.__init__

        def made(self, *args, **kwargs):
            make(self, *args, **kwargs)
            vars(self).pop(name, None)

        monkeypatch.setattr(lacking, "__init__", made)

    return without


SCHEDULER = "core.sched.scheduler.Scheduler"
RUNNER = "worker.gpu_model_runner.GPUModelRunner"


@pytest.mark.parametrize(
    ("where", "name", "said", "off"),
    [
        (SCHEDULER, "_preempt_request", "_preempt_request in its class Scheduler", ""),
        (SCHEDULER, "num_spec_tokens", "num_spec_tokens in its scheduler", OFF),
        (
            "core.kv_cache_manager.KVCacheManager",
            "usage",
            "kv_cache_manager.usage in its sched",
            "",
        ),
        ("request.Request", "num_output_tokens", "num_output_tokens in its request", ""),
        ("request.Request", "spec_token_ids", "spec_token_ids in its request", OFF),
        ("engine.llm_engine.LLMEngine", "collective_rpc", "collective_rpc in its engine", ""),
        (RUNNER, "rejection_sampler", "rejection_sampler in its model runner", OFF),
    ],
)
def test_a_name_that_vllm_lacks_is_one_line(without, made, where, name, said, off):
    import vllm

    without(where, name)
    with pytest.raises(ValueError, match="here: vLLM ") as raised:
        made()
    line = str(raised.value)
    assert f"vLLM {vllm.__version__} has no {said}" in line
    assert line.endswith("install vllm 0.32" + off)
    assert "\n" not in line


def test_what_only_drafts_need_is_asked_for_where_they_are_on(without, made):
    without(RUNNER, "effective_drafter_max_model_len")
    with pytest.raises(ValueError, match="effective_drafter_max_model_len in its model runner"):
        made()
    assert not made("off").info().speculates
