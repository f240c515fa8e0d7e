"""What may be a secret has stars wherever it is shown."""

import pytest

from rollpacker.config.secrets import STARS, masked, masked_argument

SHOWN = {
    "model": {"path": "Qwen/Qwen3-0.6B", "max_tokens": 5},
    "mux": {"token_file": "runs/mux/token", "url": "https://head:8642"},
    "data": {"answer_key": 3, "keyword": "task", "author": "me", "passes": "2"},
}


def test_what_is_none_stays() -> None:
    assert masked(SHOWN) == SHOWN


@pytest.mark.parametrize(
    "name",
    ["api_key", "apikey_secret", "token", "hf_token", "password", "DB_PASSWD", "Authorization",
     "credentials", "bearer", "session.cookie", "keys"],
)  # fmt: skip
def test_names(name: str) -> None:
    assert masked({"options": {name: "x", "other": "y"}}) == {
        "options": {name: STARS, "other": "y"}
    }
    assert masked({name: ["x", 1, None, ""]}) == {name: [STARS, 1, None, ""]}


@pytest.mark.parametrize(
    "text",
    ["sk-proj-0123456789abcdef", "hf_ABCDEFGHIJKLMNOP", "ghp_0123456789abcdef",
     "postgresql://me:hunter2@db/x", "use sk-0123456789abcdef"],
)  # fmt: skip
def test_looks(text: str) -> None:
    assert masked({"url": text}) == {"url": STARS}


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("rewards.0.options.api_key=abc", "rewards.0.options.api_key=***"),
        ("--api-key=abc", "--api-key=***"),
        ("mux.token_file=runs/token", "mux.token_file=runs/token"),
        ("a=b=c", "a=b=c"),
        ("hf_ABCDEFGHIJKLMNOP", "***"),
        ("train.yaml", "train.yaml"),
    ],
)
def test_arguments(given: str, shown: str) -> None:
    assert masked_argument(given) == shown
