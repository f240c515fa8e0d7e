"""Sequence-classification models as rewards: the same scores as TRL's recipe gives. In a grading
process they run in ``test_judge_reward.py``, beside judges."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from judge_models import save_critic
from transformers import AutoTokenizer, Qwen2ForSequenceClassification

from rollpacker.core.types import AttemptId
from rollpacker.reward.base import GradeRequest
from rollpacker.reward.functions import resolve

TEXTS = ["1", "12+", "3=3=3"]

MODULE = """
import torch
from transformers import AutoModelForSequenceClassification

class Model(torch.nn.Module):
    def __init__(self, folder):
        super().__init__()
        self.inner = AutoModelForSequenceClassification.from_pretrained(folder)
        self.config = self.inner.config

    def forward(self, input_ids, attention_mask, **_):
        return self.inner(input_ids, attention_mask)

def load(folder):
    return Model(folder)

class Texts(torch.nn.Module):
    def forward(self, completions, **_):
        return torch.tensor([float(len(text)) for text in completions])

class NoConfig(torch.nn.Module):
    def forward(self, input_ids):
        return input_ids
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_critic(tmp_path_factory.mktemp("reward") / "critic")


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "critics.py"
    path.write_text(MODULE)
    return path


def expected(folder: Path, texts: list[str]) -> list[float]:
    """One by one, so that nothing is padded."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen2ForSequenceClassification.from_pretrained(folder).eval()
    scores: list[float] = []
    for text in texts:
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        with torch.inference_mode():
            scores.append(model(**inputs).logits[0, 0].item())
    return scores


def asked(texts: list[str], prompt: Any = "7=") -> list[GradeRequest]:
    return [
        GradeRequest(
            attempt=AttemptId(i), prompt=prompt, completion=text, completion_ids=[], row={}
        )
        for i, text in enumerate(texts)
    ]


def test_a_checkpoint_scores_prompt_and_response(folder: Path) -> None:
    scores = resolve(str(folder), {})(asked(TEXTS))
    assert scores == pytest.approx(expected(folder, [f"7={text}" for text in TEXTS]), abs=1e-5)
    assert len({round(score, 4) for score in scores}) == 3


def test_messages_go_through_the_chat_template(folder: Path) -> None:
    score = resolve(str(folder), {})
    score._tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}={% endfor %}"
    chat = [{"role": "user", "content": "7"}]
    assert score(asked(["1"], chat)) == pytest.approx(expected(folder, ["7=1="]), abs=1e-5)


def test_a_module_by_its_path(folder: Path, module: Path) -> None:
    score = resolve(f"{module}:Model", {"folder": str(folder)})
    assert score(asked(TEXTS)) == pytest.approx(
        expected(folder, [f"7={t}" for t in TEXTS]), abs=1e-5
    )
    assert resolve(f"{module}:Texts", {})(asked(TEXTS)) == [1.0, 3.0, 5.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devise": "cpu"}, "takes no option 'devise'; it takes ['device', 'dtype', 'tokenizer']"),
        ({"dtype": "float31"}, "'float31' is not a dtype (options.dtype)"),
        ({"device": "cuda:7"}, "cannot run on 'cuda:7' (options.device)"),
        ({"tokenizer": "nowhere"}, "has no tokenizer in 'nowhere' (options.tokenizer)"),
    ],
)
def test_mistakes_are_one_line(folder: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        resolve(str(folder), options)
    assert "\n" not in str(caught.value)


def test_what_is_no_reward_model(tmp_path: Path, module: Path) -> None:
    with pytest.raises(ValueError, match="is not a reward model: it has no config"):
        resolve(str(tmp_path), {})
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ValueError, match=r"rewards: cannot load '.*': OSError") as caught:
        resolve(str(tmp_path), {})
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="let its forward take completions instead"):
        resolve(f"{module}:NoConfig", {})
