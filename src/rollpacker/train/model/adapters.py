"""Adapters of peft, merged into the plain weights that engines decode from. peft itself merges
them, module by module, into copies. ``KINDS`` has the kinds for which the merged weights were
measured to equal the trained model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from rollpacker.checkpoint_names import stored

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_VIRTUAL = "its virtual tokens are not weights of the model"
_BY_INPUT = "its addition depends on the input, so it is not a weight"
_MERGED = ""

KINDS: dict[str, str] = {
    **dict.fromkeys(
        (
            *("ADALORA", "BEFT", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "FROD", "GLORA"),
            *("GRALORA", "HIRA", "HRA", "IA3", "LN_TUNING", "LOHA", "LOKR", "LORA", "MISS", "OFT"),
            *("OSF", "PEANUT", "PSOFT", "RANDLORA", "ROAD", "SHIRA", "SUPERTUNING", "TINYLORA"),
            *("TRAINABLE_TOKENS", "UNILORA", "VBLORA", "VERA", "WAVEFT"),
        ),
        _MERGED,
    ),
    **dict.fromkeys(
        (
            *("CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "PREFIX_TUNING", "PROMPT_TUNING"),
            "P_TUNING",
        ),
        _VIRTUAL,
    ),
    **dict.fromkeys(("ADAPTION_PROMPT", "LILY", "POLY", "SHADOW", "XLORA"), _BY_INPUT),
    "ADAMSS": "it needs scikit-learn, and is untested",
    "PVERA": "it is random during training, so no fixed weights equal it",
}
"""peft's kinds (``PeftType``), each with the reason why it cannot be merged. Empty if it can."""

_OPTIONS: dict[str, str] = {
    "alora_invocation_tokens": _BY_INPUT,
    "arrow_config": _BY_INPUT,
    "layer_replication": "it changes the number of layers",
    "megatron_config": "its layers are not those of transformers",
    "monteclora_config": KINDS["PVERA"],
    "target_parameters": "it changes parameters instead of modules",
    "use_qalora": "it is for quantized models",
}
"""Options of adapters that can be merged otherwise."""

_TIED = (
    "the model's input and output embeddings are one matrix (tie_word_embeddings), which {0} would "
    "split: leave them out, or untie the model first"
)
_EMBEDDINGS = ("embed_tokens", "lm_head")
_STEP = 0.05  # standard deviation by which trained weights are moved for a comparison
_CLOSE = 1e-5  # relative to the largest value: float32 sums in another order


def check_kind(kind: str) -> None:
    """Raise ``ValueError`` in one line for one of peft's kinds that cannot be merged."""
    why = KINDS.get(kind, "this kind is untested")
    if why:
        raise ValueError(f"adapter of kind {kind}: {why}: take another one, such as LoraConfig")


def check_config(config: Any, tied: bool = False) -> None:
    """Raise ``ValueError`` in one line for a ``PeftConfig`` whose adapter cannot be merged.
    ``tied``: the model's output embeddings are its input embeddings. ``check_adapted`` finds the
    problems that only the adapted model shows."""
    kind = _kind(config)
    check_kind(kind)
    for option, why in _OPTIONS.items():
        if getattr(config, option, None):
            raise ValueError(f"adapter of kind {kind}: {option}: {why}: leave it out")
    parting = ["target_modules"]
    if not getattr(config, "ensure_weight_tying", False):
        parting.append("modules_to_save")
    for option in parting if tied and kind != "TRAINABLE_TOKENS" else ():
        named = getattr(config, option, None) or ()
        if not isinstance(named, str) and any(str(n).endswith(_EMBEDDINGS) for n in named):
            raise ValueError(f"adapter of kind {kind}: {_TIED.format(option)}")


def _kind(config: Any) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type))


def has_adapters(model: torch.nn.Module) -> bool:
    """Whether an adapter wraps any module, or trains a copy of it."""
    return any(map(_is_wrapper, model.modules()))


def check_adapted(model: Any) -> None:
    """Raise ``ValueError`` in one line if ``merged_weights`` would not equal the adapted model.
    ``model`` is a ``PeftModel``, or a transformers model with adapters in it. A copy of each module
    is tried with changed weights, as most adapters change nothing before the first update."""
    check_active(model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for name, module in _wrapped(base).items():
        _check_merge(name, module)
    _check_tied(base)


def check_active(model: Any) -> None:
    """``check_config`` of a model's active adapters, if it has any."""
    configs: dict[str, Any] = getattr(model, "peft_config", None) or {}
    given: Any = getattr(model, "active_adapters", []) if configs else []
    own: Any = given() if callable(given) else given  # a method of transformers' models
    names = [name for module in _wrapped(model).values() for name in module.active_adapters]
    for name in dict.fromkeys([*own, *names]):
        if name in configs:
            check_config(configs[name])


def merged_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights by the base model's names, adapters merged into copies, one module at a time.
    Sums and products are in float32, and results in the base model's type. Persistent buffers are
    included."""
    return _unwrapped(model, _merged)


def bare_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The live weights without adapters, by the names of ``merged_weights``."""
    return _unwrapped(model, lambda module: stored(_base(module)))


def _unwrapped(
    model: torch.nn.Module, of: Callable[[Any], Iterator[tuple[str, torch.Tensor]]]
) -> Iterator[tuple[str, torch.Tensor]]:
    wrapped = _wrapped(model)
    done: set[str] = set()
    for name, tensor in list(stored(model)):
        owner = _owner(name, wrapped)
        if owner is None:
            yield name, tensor
        elif owner not in done:
            done.add(owner)
            for leaf, value in of(wrapped[owner]):
                yield f"{owner}.{leaf}", value


def bare_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A model without adapters to decode from, to be filled with ``merged_weights``. Weights that
    no adapter changes share the storage of ``model``."""
    wrapped = _wrapped(model)
    changed = {id(p) for module in wrapped.values() for p in _base(module).parameters()}
    shared: dict[int, Any] = {id(p): p for p in model.parameters() if id(p) not in changed}
    copied = copy.deepcopy(model, shared)
    for name in wrapped:
        copied.set_submodule(name, _base(copied.get_submodule(name)))
    return copied


def _is_wrapper(module: torch.nn.Module) -> bool:
    own = hasattr(module, "unload_and_optionally_merge_module")
    return own or (hasattr(module, "base_layer") and hasattr(module, "merge"))


def _wrapped(model: torch.nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if _is_wrapper(module) and _owner(name, found) is None:
            found[name] = module
    return found


def _owner(name: str, wrapped: dict[str, Any]) -> str | None:
    while name:
        name = name.rpartition(".")[0]
        if name in wrapped:
            return name
    return None


def _base(module: Any) -> Any:
    if hasattr(module, "get_base_layer"):
        return module.get_base_layer()
    return module.original_module


def _copied(module: Any) -> Any:
    memo: dict[int, Any] = {
        id(p): torch.nn.Parameter(p.detach().clone(), p.requires_grad) for p in module.parameters()
    }
    return copy.deepcopy(module, memo).float()


@torch.no_grad()
def _plain(module: Any) -> torch.nn.Module:
    own = _copied(module)
    if own.disable_adapters:
        return _base(own)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tied embeddings and adapters merged before
        if hasattr(own, "unload_and_optionally_merge_module"):
            return own.unload_and_optionally_merge_module(True, False, None)
        own.merge()
    return own.get_base_layer()


def _merged(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    types = {leaf: tensor.dtype for leaf, tensor in stored(_base(module))}
    for leaf, value in stored(_plain(module)):
        yield leaf, value.to(types[leaf])


def _check_merge(name: str, module: Any) -> None:
    before = {leaf: p.shape for leaf, p in _base(module).named_parameters()}
    try:
        moved = _moved(module)
        plain = _plain(moved)
        after = {leaf: p.shape for leaf, p in plain.named_parameters()}
        exact = after == before and _agree(moved, plain)
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"the adapter on {name} cannot be merged: {first}") from error
    if not exact:
        raise ValueError(
            f"the adapter on {name} cannot be merged into its weights: leave the module out, or "
            "take a plain LoraConfig"
        )


@torch.no_grad()
def _moved(module: Any) -> Any:
    own = _copied(module).eval()
    draws = torch.Generator().manual_seed(0)
    for parameter in own.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=draws, dtype=parameter.dtype)
            parameter.add_(_STEP * noise.to(parameter.device))
    return own


@torch.no_grad()
def _agree(module: Any, plain: Any) -> bool:
    weight = next(plain.parameters())
    draws = torch.Generator().manual_seed(0)
    if isinstance(plain, torch.nn.Embedding):
        given = torch.arange(len(weight))[None]
    else:
        given = torch.randn(1, 4, weight.shape[-1], generator=draws)
    one, other = (each(given.to(weight.device)) for each in (module, plain))
    return torch.allclose(one, other, rtol=_CLOSE, atol=_CLOSE * float(other.abs().max()))


def _check_tied(base: Any) -> None:
    pair = torch.nn.ModuleList([base.get_input_embeddings(), base.get_output_embeddings()])
    if not base.config.tie_word_embeddings or not has_adapters(pair):
        return
    both: list[Any] = [_plain(m) if _is_wrapper(m) else m for m in _moved(pair)]
    if not torch.allclose(both[0].weight, both[1].weight, atol=_CLOSE):
        raise ValueError(f"adapter: {_TIED.format('it')}")
