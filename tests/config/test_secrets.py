"""What may be a secret has stars wherever it is shown."""

import pytest

from rollpacker.config import parse
from rollpacker.config.reading import STARS, masked, masked_command

SHOWN = {
    "model": {"path": "Qwen/Qwen3-0.6B", "max_tokens": 5},
    "mux": {"token_file": "runs/mux/token", "url": "https://head:8642"},
    "data": {
        "answer_key": "B",
        "input_key": "question",
        "label_key": "answer",
        "keyword": "task",
        "author": "me",
        "passes": "2",
    },
}


def test_what_is_none_stays() -> None:
    assert masked(SHOWN) == SHOWN


@pytest.mark.parametrize(
    "name",
    ["api_key", "apikey", "apiKey", "openai_key_1", "token", "hf_token", "password", "password1",
     "DB_PASSWD", "Authorization", "credentials", "bearer", "session.cookie", "keys"],
)  # fmt: skip
def test_names(name: str) -> None:
    assert masked({"options": {name: "x", "other": "y"}}) == {
        "options": {name: STARS, "other": "y"}
    }
    assert masked({name: ["x", 1, None, ""]}) == {name: [STARS, 1, None, ""]}


@pytest.mark.parametrize(
    "text",
    ["sk-proj-0123456789abcdef", "hf_ABCDEFGHIJKLMNOP", "ghp_0123456789abcdef",
     "github_pat_11ABCDEFG0_x123",
     "postgresql://me:hunter2@db/x", "use sk-0123456789abcdef"],
)  # fmt: skip
def test_looks(text: str) -> None:
    assert masked({"url": text}) == {"url": STARS}


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("rewards.0.options.api_key=abc", "rewards.0.options.api_key=***"),
        ("train --api-key=abc", "train --api-key=***"),
        ("train --api-key abc --steps 3", "train --api-key *** --steps 3"),
        ("mux.token_file=runs/token --token-file runs/token",) * 2,
        ("a=b=c --key --verbose",) * 2,
        ("x hf_ABCDEFGHIJKLMNOP", "x ***"),
    ],
)
def test_arguments(given: str, shown: str) -> None:
    assert " ".join(masked_command(given.split())) == shown


def test_a_run_that_has_none_is_shown_as_it_is() -> None:
    tree = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"function": "math"}]}
    for mode in ("exact", "partial"):
        run = parse(tree | {"rollout": {"tail_batching": {"mode": mode}}}).model_dump(mode="json")
        assert masked(run) == run
    given = ["rollout.tail_batching.stale_tokens=mask"]
    assert masked_command(given) == given
