"""vLLM behind the engine protocol."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind

from rollpacker.core.types import AttemptId, FinishReason, PromptId
from rollpacker.engine.base import (
    ALONE,
    EngineInfo,
    EngineStats,
    Output,
    Request,
    Span,
    Speculation,
    StopWatcher,
    check_request,
    stops_of,
)
from rollpacker.engine.base import SamplingParams as Sampling
from rollpacker.engine.drafts import Drafter
from rollpacker.engine.latency import ON_A_CPU, ON_A_GPU, decode_ahead, measure_steps
from rollpacker.engine.probe import answers, differ, drafts_differ
from rollpacker.engine.vllm.build import build, room
from rollpacker.engine.vllm.drawing import VllmAttempt, VllmSpeculator
from rollpacker.engine.vllm.weights import Checked, names_of, reload
from rollpacker.errors import words_of
from rollpacker.hub import config_folder

if TYPE_CHECKING:
    from rollpacker.config import ModelConfig, VllmEngineConfig

_GONE = "the engine has no weights since it slept or a load failed: load weights first"
_MEASURED = (1, 4, 16, 32, 64)
_MEASURED_ON_A_GPU = (*_MEASURED, 128, 256, 512)
_MEASURED_AT = 32  # tokens of context, so that all prompts together are one chunk of prefill


class VllmEngine:
    """vLLM in this process, on one device or as one of several. A process has at most one.

    ``sampling`` draws the tokens, so a seed gives the response of ``mini`` unless rounding decides
    a near tie. The engine breaks if the default group of ``torch.distributed`` is destroyed.

    If it spans several devices, one process of each builds it, with the same arguments except
    ``device`` and ``span.rank``. All must then get the same calls in the same order
    (``engine.relay``).

    Args:
        model: the checkpoint, for its shape. Weights come with ``load_weights``.
        tokenizer: needed only for stop strings.
        device: ``cpu`` or ``cuda:N``, the current one.
        sharers: processes that share the device, this one among them.
        alone: no transformers model is used in this process, as vLLM may change their classes.
        verifies: it can decode ahead. None: on a CPU, and on GPUs whose attention takes rows of
            unequal length (Ampere to Hopper).
        proves: try sleep and drafts with the first weights, and replace or disable them if they
            change a response. None: on GPUs.

    Raises ``ValueError`` for a model that is missing, or that vLLM cannot run here.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        config: VllmEngineConfig,
        tokenizer: Any = None,
        device: str = "cpu",
        sharers: int = 1,
        span: Span = ALONE,
        alone: bool = True,
        drafter: Drafter | None = None,
        verifies: bool | None = None,
        proves: bool | None = None,
        note: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self._tokenizer = tokenizer
        self._device, self._devices = device, span.size
        self._most_running = config.max_running
        self._folder = config_folder(model.path)
        found = model.model_copy(update={"path": self._folder})
        self._path = model.path
        self._note = note
        self._proves = device != "cpu" if proves is None else proves
        self._drafter = drafter
        self._sleeps = 2  # level 1 would copy the weights to the host, though new ones follow
        self._build = lambda verifies: build(
            found, config, device, sharers, span, alone=alone, verifies=verifies
        )
        self._begin(_takes_drafts(device) if verifies is None else verifies)

    def _begin(self, verifies: bool) -> None:
        try:
            self._engine: Any = self._build(verifies)
        except ValueError as error:
            if not (verifies and self._proves):
                raise
            self._engine = self._build(False)
            self._note(f"WARNING decoding ahead stays off: vLLM does not start with it: {error}")
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._context: int = self._engine.model_config.max_model_len
        self._vocabulary: int = self._engine.model_config.get_vocab_size()
        self._names = names_of(self._folder, self._engine.vllm_config)
        self._rows: dict[AttemptId, VllmAttempt] = {}
        self._by_key: dict[str, VllmAttempt] = {}
        self._submitted = self._version = self._steps = self._generated = 0
        self._bare = False
        self._ahead: VllmSpeculator | None = None
        if self._engine.vllm_config.speculative_config is not None:
            self._ahead = VllmSpeculator(
                self._scheduler, self._most_running, self._context, self._drafter or Drafter()
            )
            self._scheduler.ahead = self._ahead
        self._try()

    def _try(self) -> None:
        """Sample one token, as vLLM's attention reports its limits only when it runs."""
        request = Request(
            attempt=AttemptId(-1),
            group=PromptId("first"),
            prompt=np.zeros(1, np.int32),
            params=Sampling(max_tokens=1, ignore_stop=True),
            seed=0,
        )
        try:
            self.submit([request])
            self.step()
        except Exception as error:
            raise ValueError(
                f"engine.kind=vllm cannot run {self._path} here: {words_of(error)}"
            ) from error
        self._steps = self._generated = 0

    def info(self) -> EngineInfo:
        on_cpu = self._device == "cpu"
        contexts = (ON_A_CPU if on_cpu else ON_A_GPU).within(
            self._context, self._kv_tokens, self._most_running
        )
        sizes = _MEASURED if on_cpu else _MEASURED_ON_A_GPU
        measured = measure_steps(self, sizes, min(_MEASURED_AT, self._context // 2), contexts)
        if self._ahead is not None and not self._proves:
            decode_ahead(self, self._context)
            self._ahead.turn_over()
        return EngineInfo(
            kv_tokens=self._kv_tokens,
            max_length=self._context,
            tensor_parallel=(self._devices,),
            latency=measured.decode,
            prefill_token_s=measured.prefill_token_s,
            exact_seeds=False,
            context_token_s=measured.context_token_s,
            speculates=self._ahead is not None,
        )

    @property
    def _kv_tokens(self) -> int:
        return room(self._scheduler, self._engine.vllm_config)

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._check(request)
        for request in requests:
            self._add(request)

    def speculate(self, how: Speculation) -> None:
        if self._ahead is not None:
            self._ahead.follow(how)

    def step(self) -> list[Output]:
        if not self.busy():
            return []
        outputs: list[Output] = []
        stopped: list[VllmAttempt] = []
        for told in self._engine.step():
            row = self._by_key[told.request_id]
            (out,) = told.outputs
            ended = self._append(row, out.token_ids)
            if told.finished:
                reason = "stop" if ended or out.finish_reason == "stop" else "length"
                outputs.append(self._forget(row, reason))
            elif ended:
                stopped.append(row)
        if self._ahead is not None:
            self._ahead.settle()
        self._steps += 1
        return outputs + self._remove(stopped, "stop")

    def _append(self, row: VllmAttempt, told: Sequence[int]) -> bool:
        assert list(told) == [token for token, _ in row.drawn[: len(told)]]
        for token, logprob in row.drawn[: len(told)]:
            row.tokens.append(token)
            row.logprobs.append(logprob)
            self._generated += 1
            if row.watcher is not None and row.watcher.found(_ints(row.tokens)):
                return True
        return False

    def abort(self, attempts: Collection[AttemptId]) -> list[Output]:
        return self._remove([self._rows[a] for a in attempts if a in self._rows], "abort")

    def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int
    ) -> None:
        """Take new weights, by the checkpoint's names. None keeps the current ones.

        Raises ``RuntimeError`` when attempts are held or there are no weights to keep. Raises
        ``ValueError`` on wrong names, and if a parameter would keep its old values. Then nothing is
        sampled until good weights come.
        """
        if self.busy():
            raise RuntimeError("weights cannot change while attempts are held: abort them first")
        if weights is None and self._bare:
            raise RuntimeError(_GONE)
        if weights is not None:
            self._reload(weights)
        self._drop_prefixes()
        if self._ahead is not None:
            self._ahead.turn_over()
        if self._proves and weights is not None:
            self._proves = False
            if self._engine.model_config.enable_sleep_mode and self._devices == 1:
                self._prove_sleep(weights)
            if self._ahead is not None:
                self._prove_drafts(self._ahead)
        self._version = version

    def _reload(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._bare = True
        checked = Checked(weights, self._names)
        (kept,) = self._engine.collective_rpc(reload, args=(checked,))
        checked.verify()
        if kept:
            raise ValueError(
                f"engine.kind=vllm cannot run {self._path}: its weights have none for vLLM's "
                f"parameter {kept[0]!r} ({len(kept)} missing in all)"
            )
        self._bare = False

    def _prove_sleep(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Rebuild the engine with a sleep that keeps every tensor, if a sleep changed its answers.
        Level 2 keeps only a model's named buffers, and some families hold other tensors. An engine
        of several devices cannot be rebuilt, so only ``doctor --run`` tries its sleep."""
        before = answers(self)
        self.sleep()
        self.wake()
        self._reload(weights)
        problem = differ(before, answers(self), loose=self._loose)
        if problem:
            self._note(
                "WARNING the engine's sleep keeps a copy of the weights on the host, as without "
                f"it {problem}"
            )
            self._sleeps = 1
            verifies = self._ahead is not None
            self.close()
            self._begin(verifies)
            self._reload(weights)

    @property
    def _loose(self) -> bool:
        return self._engine.model_config.dtype != torch.float32

    def _prove_drafts(self, ahead: VllmSpeculator) -> None:
        try:
            problem = drafts_differ(self, loose=self._loose)
        except Exception as error:
            problem = words_of(error) or type(error).__name__
            self._remove([*self._rows.values()], "abort")
        if problem:
            self._note(f"WARNING decoding ahead stays off: with drafts, {problem}")
            self._ahead = self._scheduler.ahead = None
        else:
            ahead.turn_over()
        self._drop_prefixes()

    def sleep(self) -> None:
        """Free the memory of KV cache and weights (a CPU keeps it), and forget what a dropped step
        left."""
        self._remove([*self._rows.values()], "abort")
        self._drop_prefixes()
        self._bare = True
        if self._engine.model_config.enable_sleep_mode:
            self._engine.sleep(level=self._sleeps)

    def wake(self) -> None:
        if self._engine.model_config.enable_sleep_mode:
            self._engine.wake_up()

    def busy(self) -> bool:
        return bool(self._rows)

    def stats(self) -> EngineStats:
        running, waiting = self._scheduler.get_request_counts()
        return EngineStats(
            running=running,
            waiting=waiting,
            kv_used=self._scheduler.kv_cache_manager.usage,
            preemptions=self._scheduler.preemptions,
            steps=self._steps,
            generated_tokens=self._generated,
            prefill_tokens=self._scheduler.prefilled,
            rows=self._scheduler.rows,
        )

    def close(self) -> None:
        """End it and the process's groups of ``torch.distributed``, so that another can be
        built."""
        self._engine.engine_core.shutdown()

    def _check(self, request: Request) -> None:
        if self._bare:
            raise RuntimeError(_GONE)
        if request.attempt in self._rows:
            raise ValueError(f"attempt {request.attempt} is already held")
        check_request(
            request,
            room=self._context,
            vocabulary=self._vocabulary,
            decodes=self._tokenizer is not None,
        )

    def _add(self, request: Request) -> None:
        params = request.params
        stops = stops_of(request)
        self._submitted += 1
        row = VllmAttempt(
            request=request,
            key=f"{request.attempt}/{self._submitted}",
            tokens=request.generated.tolist(),
            logprobs=request.logprobs.tolist(),
            watcher=StopWatcher(self._tokenizer, stops, request.turn_start) if stops else None,
        )
        sampling = SamplingParams(
            max_tokens=params.max_tokens - len(row.tokens),
            temperature=0.0,
            ignore_eos=True,
            stop_token_ids=[] if params.ignore_stop else list(params.stop_token_ids),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"row": row},
            skip_clone=True,
        )
        prompt = [*request.prompt.tolist(), *row.tokens]
        self._engine.add_request(row.key, tokens_input(prompt), sampling)
        self._rows[request.attempt] = self._by_key[row.key] = row
        if self._ahead is not None:
            self._ahead.hear(request)

    def _remove(self, rows: list[VllmAttempt], reason: FinishReason) -> list[Output]:
        if rows:
            self._engine.abort_request([row.key for row in rows])
        return [self._forget(row, reason) for row in rows]

    def _forget(self, row: VllmAttempt, reason: FinishReason) -> Output:
        attempt = row.request.attempt
        del self._rows[attempt], self._by_key[row.key]
        if self._ahead is not None:
            self._ahead.gone(row)
        return Output(
            attempt=attempt,
            tokens=_ints(row.tokens),
            logprobs=np.array(row.logprobs, np.float32),
            finish_reason=reason,
            weights_version=self._version,
            drafts=row.drafts,
        )

    def _drop_prefixes(self) -> None:
        """Forget cached prefixes. vLLM refuses while a sequence has blocks."""
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM still holds KV blocks and kept its cached prefixes")


def _takes_drafts(device: str) -> bool:
    return device == "cpu" or torch.cuda.get_device_capability(device)[0] in (8, 9)


def _ints(tokens: Sequence[int]) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)
