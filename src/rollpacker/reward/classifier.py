"""Reward models: the first logit of a sequence-classification model on prompt and response, as in
TRL's trainers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from rollpacker.errors import one_line
from rollpacker.reward.base import GradeRequest, GradingError
from rollpacker.user_code import Parameters


class Classifier:
    """Scores responses with a sequence-classification model."""

    def __init__(self, model: Any, tokenizer: Any, device: str) -> None:
        self._tokenizer = tokenizer
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        # The model reads its score at the last token that is not padding.
        model.config.pad_token_id = tokenizer.pad_token_id
        self._model = model.to(device).eval()
        self._device = device

    def __call__(self, requests: Sequence[GradeRequest]) -> list[float]:
        """One score each. Raises ``GradingError`` if a score is not finite."""
        inputs = self._tokenizer(
            [self._text(request) for request in requests],
            return_tensors="pt",
            padding=True,
            padding_side="right",
            add_special_tokens=False,
        )
        with torch.inference_mode():
            logits = self._model(**inputs.to(self._device)).logits[:, 0]
        scores = logits.float()
        if not torch.isfinite(scores).all():
            raise GradingError("the reward model's score is not finite")
        return scores.tolist()

    def _text(self, request: GradeRequest) -> str:
        if isinstance(request.prompt, str):
            return request.prompt + request.text
        answer = {"role": "assistant", "content": request.text}
        return self._tokenizer.apply_chat_template([*request.prompt, answer], tokenize=False)


_HERE: Any = {"local_files_only": True, "trust_remote_code": False}  # never prompt for trust


class _Options(NamedTuple):
    device: str = "cpu"
    dtype: str = "float32"
    tokenizer: str | None = None


def from_checkpoint(function: str, options: Mapping[str, Any]) -> Classifier:
    """Load a checkpoint's folder. Raises ``ValueError``. ``options`` are ``device``, ``dtype`` and
    ``tokenizer``, a folder other than the checkpoint's."""
    chosen = _read(function, options)
    folder = Path(function).expanduser()
    if not (folder / "config.json").is_file():
        raise ValueError(f"rewards: '{function}' is not a reward model: it has no config.json")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        model = AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=1, dtype=chosen.dtype, **_HERE
        )
    except Exception as error:  # transformers raises many kinds on a damaged checkpoint
        raise ValueError(f"rewards: cannot load '{function}': {one_line(error)}") from error
    return _made(function, model, chosen, folder)


def from_module(function: str, module: Any, options: Mapping[str, Any]) -> Classifier:
    """Wrap a module whose ``forward`` takes token ids. Raises ``ValueError``."""
    chosen = _read(function, options)
    config = getattr(module, "config", None)
    if config is None:
        raise ValueError(
            f"rewards: '{function}' is a module that takes token ids but has no config like "
            "transformers' models: let its forward take completions instead"
        )
    return _made(function, module.to(getattr(torch, chosen.dtype)), chosen, config._name_or_path)


def _made(function: str, model: Any, chosen: _Options, folder: str | Path) -> Classifier:
    place = chosen.tokenizer or folder
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, **_HERE)
    except Exception as error:
        raise ValueError(
            f"rewards: '{function}' has no tokenizer in '{place}' (options.tokenizer): "
            f"{one_line(error)}"
        ) from error
    try:
        return Classifier(model, tokenizer, chosen.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"rewards: '{function}' cannot run on '{chosen.device}' (options.device): "
            f"{one_line(error)}"
        ) from error


def _read(function: str, options: Mapping[str, Any]) -> _Options:
    Parameters(function, _Options).check_options(options)
    chosen = _Options(**options)
    if not isinstance(getattr(torch, str(chosen.dtype), None), torch.dtype):
        raise ValueError(f"rewards: '{function}': '{chosen.dtype}' is not a dtype (options.dtype)")
    return chosen
