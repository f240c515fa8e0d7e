"""A configuration without a learning rate gets one that suits its model."""

import re
from io import StringIO

import pytest
import yaml
from rich.console import Console
from runtime_jobs import Workshop, metrics, run
from transformers import AutoConfig, AutoModelForCausalLM

from rollpacker import config, job
from rollpacker.job.ask.draft import Wishes, draft
from rollpacker.job.plan.defaults import count_model, with_learning_rate
from rollpacker.runtime.record.progress import Progress
from rollpacker.train.state.optimizer import default_learning_rate


@pytest.mark.parametrize(
    ("parameters", "lora", "rate"),
    [
        (70_000_000_000, False, 1e-6),
        (7_600_000_000, False, 1e-6),
        (494_000_000, False, 3.8e-6),
        (134_500_000, False, 7.2e-6),
        (200_000, False, 1.9e-4),
        (7_600_000_000, True, 1e-5),
        (494_000_000, True, 3.8e-5),
    ],
)
def test_smaller_models_and_adapters_take_larger_steps(parameters, lora, rate):
    assert default_learning_rate(parameters, lora=lora) == rate


def without_rate(shop: Workshop, name: str, **changes) -> config.RunConfig:
    tree = shop.tree(name, devices__per_node=1, **changes)
    del tree["train"]["learning_rate"]
    return config.parse(tree)


def test_a_job_with_adapters_takes_their_rate(tmp_path):
    shop = Workshop(tmp_path, rows=4)
    total = count_model(str(shop.model)).total
    for rank in (0, 4):
        made, said = without_rate(shop, "run", model__lora_rank=rank), StringIO()
        chosen = with_learning_rate(made, None, Progress(Console(file=said, width=999)))
        assert chosen.train.learning_rate == default_learning_rate(total, lora=rank > 0)
        assert said.getvalue().endswith(" with LoRA\n") is (rank > 0)


@pytest.mark.wide
def test_a_run_says_and_keeps_the_rate_that_it_chose(tmp_path):
    shop = Workshop(tmp_path)
    folder, said = run(without_rate(shop, "run", steps=1))
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    rate = saved["train"]["learning_rate"]
    (line,) = re.findall(r"train\.learning_rate: (\S+), for (\S+)k parameters", said)
    assert float(line[0]) == rate > 1e-4
    assert float(line[1]) < 100
    assert metrics(folder)[0]["learning_rate"] == rate


@pytest.mark.wide
def test_a_mixture_of_experts_takes_the_rate_of_all_its_weights(tmp_path):
    """A real run, which also may not go on with other experts."""
    shop = Workshop(tmp_path)
    sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    words = AutoConfig.from_pretrained(shop.model).vocab_size
    for experts in (8, 4):
        shape = AutoConfig.for_model(
            "qwen3_moe",
            **sizes,
            **heads,
            vocab_size=words,
            max_position_embeddings=256,
            num_experts=experts,
            num_experts_per_tok=2,
        )
        AutoModelForCausalLM.from_config(shape).save_pretrained(shop.model)
        if experts == 8:
            count = count_model(str(shop.model))
            changes = {"engine": {"kind": "fake"}, "checkpoint__every": 1}
            folder, said = run(without_rate(shop, "run", steps=1, **changes))
    assert f"for {count.words}\n" in said
    assert count.active < count.total
    saved = yaml.safe_load((folder / "config.yaml").read_text())["train"]["learning_rate"]
    assert saved == default_learning_rate(count.total, lora=False)
    go_on = without_rate(shop, "run", steps=2, **changes)
    with pytest.raises(ValueError, match=r"experts=8, but the trainer has num_\w*experts=4"):
        job.train(go_on, resume=True, progress=Progress(Console(quiet=True)))


@pytest.mark.wide
def test_the_built_in_engine_is_refused_before_anything_starts(tmp_path):
    shop = Workshop(tmp_path)
    small = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 256}
    words = AutoConfig.from_pretrained(shop.model).vocab_size
    shape = AutoConfig.for_model("gpt2", **small, vocab_size=words)
    AutoModelForCausalLM.from_config(shape).save_pretrained(shop.model)
    with pytest.raises(ValueError, match=r"not 'gpt2': engine\.kind=vllm may run it"):
        run(without_rate(shop, "run", steps=1))
    found = Wishes(model=str(shop.model), data=str(shop.data), reward="math")
    text, _ = draft(found, Progress(Console(quiet=True)))
    assert "engine: {kind: vllm} " in text
    assert f"the default for {count_model(str(shop.model)).words}; with LoRA" in text
