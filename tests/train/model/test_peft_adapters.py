"""The sampler decodes from what is trained, whatever adapter that is, or it is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import adapter_cases as cases
import pytest
import torch
from peft import LoraConfig, PeftType

from case_files import read_table
from rollpacker.train.model.adapters import (
    KINDS,
    bare_copy,
    check_adapted,
    check_config,
    has_adapters,
    merged_weights,
)

RECORDED = json.loads(Path(cases.__file__).with_name("adapter_results.json").read_text())
"""What docs/compatibility.md shows."""


def one_line(text: str) -> bool:
    return text.startswith(("adapter", "the adapter on ")) and "\n" not in text


@pytest.mark.parametrize("kind", list(PeftType), ids=lambda kind: kind.value)
def test_every_kind_of_peft_is_decoded_exactly_or_refused(kind: PeftType) -> None:
    """A kind of a newer release is refused until it is in ``KINDS``."""
    found = cases.measure_kind(kind, cases.mini)
    assert (found.refused is None) == (KINDS.get(kind.value) == ""), found.refused
    assert found.refused == RECORDED["kinds"][kind.value]["refused"]
    if found.refused is None:
        assert found.worst < cases.WORST
        assert found.changed > 1e-2
    else:
        assert one_line(found.refused)


REFUSED = read_table(__file__, "REFUSED")


@pytest.mark.parametrize("name", cases.OPTIONS)
def test_options_of_lora_are_decoded_exactly_or_refused(name: str) -> None:
    tied, config = cases.option_of(name)
    found = cases.measure(config, cases.mini, tied=tied)
    assert found.refused == RECORDED["options"][name]["refused"]
    if name in REFUSED:
        assert found.refused is not None
        assert one_line(found.refused)
        assert re.search(REFUSED[name], found.refused)
        return
    assert found.refused is None
    assert found.worst < cases.WORST
    assert found.changed > 1e-2


def test_a_kind_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="adapter of kind NEWEST: this kind is untested"):
        check_config(SimpleNamespace(peft_type="NEWEST"))


def lora(**options: Any) -> LoraConfig:
    given: dict[str, Any] = {"target_modules": cases.LINEAR, "task_type": "CAUSAL_LM"} | options
    return LoraConfig(**given)


def checked(adapted: Any) -> cases.Measured:
    check_adapted(adapted)
    return cases.compare(adapted, cases.build(), cases.mini)


def test_of_several_adapters_the_active_ones_count() -> None:
    adapted = cases.adapt(cases.build(), lora())
    torch.manual_seed(3)
    adapted.add_adapter("other", lora(r=3, target_modules=["q_proj", "v_proj"]))
    adapted.base_model.set_adapter(["default", "other"])
    cases.move(adapted)
    both = checked(adapted)
    adapted.base_model.set_adapter("other")
    one = checked(adapted)
    assert max(both.worst, one.worst) < cases.WORST
    assert both.changed > one.changed > 1e-2


def test_adapters_that_are_switched_off_or_merged_already() -> None:
    adapted = cases.adapt(cases.build(), lora())
    cases.move(adapted)
    with adapted.disable_adapter():
        off = cases.compare(adapted, cases.build(), cases.mini)
    assert off.worst < cases.WORST
    assert off.changed == 0
    adapted.merge_adapter()
    merged = checked(adapted)
    assert merged.worst < cases.WORST
    assert merged.changed > 1e-2


def test_weights_of_half_precision_are_rounded_once() -> None:
    adapted = cases.adapt(cases.build().to(torch.bfloat16), lora())
    cases.move(adapted)
    base = adapted.get_base_model()
    layer = base.model.layers[0].self_attn.q_proj
    exact = layer.base_layer.weight.float() + layer.get_delta_weight("default").float()
    weights = dict(merged_weights(base))
    assert torch.equal(weights["model.layers.0.self_attn.q_proj.weight"], exact.bfloat16())
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}


def test_gradients_are_not_copied() -> None:
    adapted = cases.adapt(cases.build(), lora())
    adapted(torch.tensor([[3, 4, 5]])).logits.sum().backward()
    cases.move(adapted)
    found = checked(adapted)
    assert found.worst < cases.WORST
    grads = [p.grad for p in adapted.parameters() if p.requires_grad]
    assert all(grad is not None for grad in grads)


def test_a_copy_shares_what_no_adapter_changes() -> None:
    adapted = cases.adapt(cases.build(), lora(modules_to_save=["lm_head"]))
    base = adapted.get_base_model()
    copied = bare_copy(base)
    assert [n for n, _ in copied.named_parameters()] == [
        n for n, _ in cases.build().named_parameters()
    ]
    assert not has_adapters(copied)
    own = {p.data_ptr() for p in base.parameters()}
    apart = {n for n, p in copied.named_parameters() if p.data_ptr() not in own}
    wrapped = ("q_proj", "k_proj", "down_proj", "lm_head")
    assert apart == {n for n, _ in copied.named_parameters() if n.split(".")[-2] in wrapped}
