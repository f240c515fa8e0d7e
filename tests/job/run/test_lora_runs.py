"""Whole runs with LoRA: trained, evaluated, resumed, and loaded with peft and transformers."""

import itertools
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_models import (
    FAMILIES,
    MOST,
    encode,
    engine_answer,
    load,
    merged_by_peft,
    transformers_answer,
    write_family,
)
from runtime_jobs import (
    Workshop,
    checkpoints,
    kept_groups,
    kept_samples,
    kill_group,
    metrics,
    run,
    start_cli,
    weights_digest,
    write_rows,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
AGREE = {"float32": 1e-5, "bfloat16": 0.03}
HELD_OUT = 3
FIXED = {"deterministic": True, "checkpoint": {"every": 1, "keep": 9}}
shop = Workshop.fixture(rows=8)


def settings(shop: Workshop, name: str, family: str, dtype: str, **changes: Any) -> dict[str, Any]:
    """A run of four steps whose evaluations log what was answered."""
    model = shop.folder / f"{family}-{dtype}"
    if not model.exists():
        write_family(model, family, dtype)
    log = str(shop.folder / f"{name}.log")
    return {
        "model": {"path": str(model), "dtype": dtype, "lora_rank": 4, "lora_alpha": 8.0},
        "rewards": [{"function": f"{shop.rewards}:logged", "options": {"log": log}}],
        "rollout__max_completion_length": MOST,
        "train__learning_rate": 0.05,
        "eval": {"data": {"path": str(write_rows(shop.folder / "held_out.jsonl", HELD_OUT))}},
        **changes,
    }


def answers(shop: Workshop, name: str) -> dict[str, list[int]]:
    """Token ids of the run's last greedy evaluation, by prompt."""
    lines = (shop.folder / f"{name}.log").read_text(encoding="utf-8").splitlines()
    found = dict(json.loads(line) for line in lines[-HELD_OUT:])
    assert len(found) == HELD_OUT
    return found


def check(shop: Workshop, name: str, folder: Path, family: str, dtype: str) -> None:
    """Sampler and trainer agreed, and what was saved answers as the run's evaluation did."""
    rows = metrics(folder)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert max(row["trained_tokens/abs_logprob_difference"] for row in rows) < AGREE[dtype]
    assert all(row["grad_norm"] > 0 for row in rows)
    base, kind = shop.folder / f"{family}-{dtype}", DTYPES[dtype]
    last = folder / f"checkpoint-{checkpoints(folder)[-1]}"
    saved, merged, plain = load(last, kind), merged_by_peft(base, last, kind), load(base, kind)
    stop = plain.config.eos_token_id
    moved = False
    for text, answer in answers(shop, name).items():
        prompt = encode(base, text)
        assert engine_answer(saved, prompt, stop).tokens.tolist() == answer
        assert engine_answer(merged, prompt, stop).tokens.tolist() == answer
        if dtype == "float32":
            assert transformers_answer(merged, prompt, stop) == answer
        moved |= engine_answer(plain, prompt, stop).tokens.tolist() != answer
    assert moved


def test_a_lora_run_is_what_it_saves(shop: Workshop) -> None:
    whole_run(shop, "qwen3", "race", 2, "bfloat16", 0.0)


def whole_run(
    shop: Workshop, family: str, mode: str, workers: int, dtype: str, beta: float
) -> None:
    name = f"{family}-{mode}-{workers}-{dtype}-{beta}"
    changes = settings(shop, name, family, dtype, devices__per_node=workers, train__beta=beta)
    folder, _ = run(shop.config(name, mode, **changes))
    check(shop, name, folder, family, dtype)
    assert set(kept_groups(folder).values()) == {3}
    if beta:
        assert metrics(folder)[0]["kl"] == pytest.approx(0.0, abs=1e-6)
        assert metrics(folder)[-1]["kl"] > 1e-4


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("family", "mode", "workers", "dtype", "beta"),
    list(itertools.product(FAMILIES, ("off", "exact", "race"), (1, 2), DTYPES, (0.0, 0.05))),
)
def test_every_lora_run_is_what_it_saves(
    shop: Workshop, family: str, mode: str, workers: int, dtype: str, beta: float
) -> None:
    again = Workshop(shop.folder / f"all-{family}-{mode}-{workers}-{dtype}-{beta}", rows=8)
    whole_run(again, family, mode, workers, dtype, beta)


@pytest.fixture(scope="module")
def exact(shop: Workshop) -> tuple[Path, dict[str, Any]]:
    """An uninterrupted run that keeps every checkpoint, and how it was set up."""
    changes = settings(shop, "exact", "qwen2", "float32", train__beta=0.05, devices__per_node=1)
    changes |= FIXED
    folder, _ = run(shop.config("exact", "exact", **changes))
    check(shop, "exact", folder, "qwen2", "float32")
    return folder, changes


def assert_same(folder: Path, other: Path) -> None:
    assert kept_samples(folder) == kept_samples(other)
    assert checkpoints(folder)[-1] == checkpoints(other)[-1]
    last = f"checkpoint-{checkpoints(folder)[-1]}"
    assert weights_digest(folder / last) == weights_digest(other / last)
    assert [r["loss"] for r in metrics(folder)] == [r["loss"] for r in metrics(other)]


@pytest.mark.wide
def test_a_lora_run_resumes_exactly(exact: tuple[Path, dict[str, Any]], shop: Workshop) -> None:
    folder, changes = exact
    copy = shop.folder / "crashed"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(".lock", "summary.json"))
    for later in checkpoints(copy)[2:]:
        shutil.rmtree(copy / f"checkpoint-{later}")
    _, said = run(shop.config("crashed", "exact", **changes), resume=True)
    assert "2 of them done before" in said
    assert_same(copy, folder)


@pytest.mark.wide
def test_another_rank_is_refused_on_resume(
    exact: tuple[Path, dict[str, Any]], shop: Workshop
) -> None:
    folder, changes = exact
    model = changes["model"] | {"lora_rank": 2}
    with pytest.raises(ValueError, match=r"'model\.lora_rank' was 4, now 2"):
        run(shop.config(folder.name, "exact", **(changes | {"model": model})), resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["off", "exact", "race"])
def test_kill_9_changes_nothing(shop: Workshop, mode: str) -> None:
    """A process group that is killed in its second step, in its third, and resumed."""
    own = Workshop(shop.folder / f"killed-{mode}", rows=8)
    changes = settings(own, "whole", "qwen3", "bfloat16", train__beta=0.05, devices__per_node=1)
    changes |= FIXED
    whole, _ = run(own.config("whole", mode, **changes))
    file, folder = own.file("killed", mode, **changes), own.folder / "killed"
    for step in (1, 2, 99):
        process = start_cli("train", file, "--resume", "auto")
        while process.poll() is None and not (folder / f"checkpoint-{step}").exists():
            time.sleep(0.001)
        if process.poll() is None:
            kill_group(process)
        else:
            _, said = process.communicate()
            assert process.returncode == 0, said
    assert_same(folder, whole)
