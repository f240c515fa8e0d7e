"""Runs of versions that read rows otherwise go on with the prompts that they had, or say so."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from runtime_jobs import Workshop, metrics, run, table, write_byte_model

from rollpacker import config
from rollpacker.data.base import DataError
from rollpacker.engine.sampling.race import DRAWS
from rollpacker.job.ask.assess import assess
from rollpacker.job.plan.problems import load_data
from rollpacker.job.plan.resume import choose_start
from rollpacker.runtime.record.checkpoint import VerifiedCheckpoint
from rollpacker.runtime.record.progress import Progress
from rollpacker.train.model.card import read_card

pytestmark = pytest.mark.wide

STORED = Path(__file__).parents[2] / "stored" / "v0_1_0_columns"
TRAINED = {"p0", "p1", "p3", "p7", "p8", "p9"}
"""What was not held out; p11 asks what p3 does, but ends in a space."""


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "stored"
    shutil.copytree(STORED, folder)
    monkeypatch.chdir(folder)
    return folder


def prompt_texts(folder: Path, *, before: int) -> set[tuple[str, str]]:
    rows = table(folder / "run", "kept")
    rows = rows.filter((rows["step"] >= 2) & (rows["step"] < before))
    return set(zip(rows["prompt"].to_list(), rows["prompt_text"].to_list(), strict=True))


def test_with_the_column_of_then_it_goes_on_as_it_began(stored: Path) -> None:
    asked = config.load(stored / "job.yaml", ["data.input_key=question"])
    _, said = run(asked, resume=True)
    assert "data.input_key was None and is 'question' from here on" in said
    assert "the checkpoint does not hold" not in said
    assert "2 of them done before" in said
    shown = prompt_texts(stored, before=99)
    assert {name for name, _ in shown} == TRAINED
    assert all(int(text) == int(name[1:]) % 8 for name, text in shown)
    before, after = metrics(STORED / "run"), metrics(stored / "run")
    assert [row["loss"] for row in after[:2]] == [row["loss"] for row in before[:2]]
    # From here on the checkpoints know.
    with pytest.raises(ValueError, match=r"'data\.input_key' was 'question', now None"):
        run(config.load(stored / "job.yaml", ["steps=20"]), resume=True)


def test_without_it_one_line_says_what_is_read_otherwise(stored: Path) -> None:
    _, said = run(config.load(stored / "job.yaml", ["steps=4"]), resume=True)
    (line,) = [line for line in said.splitlines() if "earlier versions" in line]
    assert line.strip() == (
        "WARNING the checkpoint does not hold what its prompts said, and earlier versions read "
        "'question' alone where 12 rows now have context + question: data.input_key: question "
        "goes on so"
    )
    assert all(
        text.startswith("12") and len(text) > 5 for _, text in prompt_texts(stored, before=4)
    )
    again = config.load(stored / "job.yaml", ["steps=5"])
    _, said = run(again, resume=True)
    assert "earlier versions" not in said
    assert {name for name, _ in prompt_texts(stored, before=5)} <= TRAINED
    # What it measures by is what it did not train on.
    result = assess(again, str(stored / "run" / "checkpoint-5"), None, Progress())
    assert result["problems"] == 12 - len(TRAINED)
    rows = (stored / "rows.jsonl").read_text(encoding="utf-8")
    (stored / "rows.jsonl").write_text(rows.replace('"12"', '"13"'), encoding="utf-8")
    with pytest.raises(DataError, match=r"other prompts of the same ids: what data\.path holds"):
        run(config.load(stored / "job.yaml", ["steps=6"]), resume=True)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    shop = Workshop(tmp_path_factory.mktemp("prompts"))
    write_byte_model(shop.folder / "chats")
    return shop


CHAT = [{"role": "user", "content": "one"}]


@pytest.mark.parametrize(
    ("row", "then", "now", "since"),
    [
        (
            {"question": "q", "context": "c"},
            {"input_key": "question"},
            {},
            "read 'question' alone where 1 rows now have context + question: data.input_key: "
            "question goes on so",
        ),
        (
            {"instruction": "do", "input": "this"},
            {"input_key": "input", "label_key": "answer"},
            {"label_key": "answer"},
            "read 'input' alone where 1 rows now have instruction + input: data.input_key: input "
            "goes on so",
        ),
        (
            {"messages": CHAT},
            {},
            {"prompt_template": "<{prompt}>"},
            "did not apply data.prompt_template to the 1 rows of chat messages: remove it to go on "
            "so",
        ),
        (
            {"messages": CHAT},
            {},
            {"chat": False},
            "did not apply data.chat to the 1 rows of chat messages: remove it to go on so",
        ),
    ],
)
@pytest.mark.parametrize("own_ids", [True, False])
def test_rows_that_are_read_otherwise(
    shop: Workshop,
    row: dict[str, Any],
    then: dict[str, Any],
    now: dict[str, Any],
    since: str,
    own_ids: bool,
) -> None:
    path = shop.folder / "read.jsonl"
    row = row | {"answer": "1"} | ({"id": "a"} if own_ids else {})
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    model = shop.folder / "chats"
    trees = [
        shop.config("r", model__path=str(model), data={"path": str(path), **keys})
        for keys in (then, now)
    ]
    card = read_card(trees[0].model)
    of_then = load_data(trees[0], card, Progress())[0].source.state_dict()
    # The same configuration as an earlier version has read it.
    earlier = {key: of_then[key] for key in of_then.keys() - {"told", "same"}}
    source = load_data(trees[1], card, Progress(), begun=earlier)[0].source
    if own_ids or "messages" in row:
        source.load_state_dict(earlier)
        with pytest.raises(DataError, match="other prompts of the same ids"):
            source.load_state_dict(of_then)
    else:
        with pytest.raises(DataError, match="other data: ") as refused:
            source.load_state_dict(earlier)
        assert str(refused.value).endswith(f"; or by an earlier version: those {since}")
    # As the line says, so it may go on; a run of this version may not.
    state = {"config": trees[1].model_dump(mode="json"), "counters": {"step": 1}}
    state |= {"draws": DRAWS}
    for kept, may in ((earlier, True), (of_then, False)):
        found = VerifiedCheckpoint(
            step=1, path=Path("checkpoint-1"), state=state | {"source": kept}
        )
        if may:
            said = choose_start(trees[0], Path("r"), found, resume=True).changed
            assert len(said) == 1
            continue
        with pytest.raises(ValueError, match=r"another config: 'data\."):
            choose_start(trees[0], Path("r"), found, resume=True)


def test_rows_that_ids_excluded(shop: Workshop) -> None:
    path, held = shop.folder / "all.jsonl", shop.folder / "held.jsonl"
    rows = [{"id": n, "prompt": f"{n:03d}", "answer": "1"} for n in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    held.write_text(json.dumps({"id": 2, "prompt": "777"}) + "\n", encoding="utf-8")
    ids = shop.folder / "ids.jsonl"
    ids.write_text(json.dumps({"id": 2}) + "\n", encoding="utf-8")
    of_now, of_then = (
        shop.config("x", data={"path": str(path), "exclude": str(file)}) for file in (held, ids)
    )
    card = read_card(of_now.model)
    earlier = load_data(of_then, card, Progress())[0].source.state_dict()
    del earlier["told"], earlier["same"]
    source = load_data(of_now, card, Progress(), begun=earlier)[0].source
    with pytest.raises(DataError, match=r"dropped the 1 rows whose id is in .*: a file of ids"):
        source.load_state_dict(earlier)
    state = {"config": of_now.model_dump(mode="json"), "counters": {"step": 1}, "source": earlier}
    state |= {"draws": DRAWS}
    found = VerifiedCheckpoint(step=1, path=Path("checkpoint-1"), state=state)
    (line,) = choose_start(of_then, Path("x"), found, resume=True).changed
    assert line.startswith("data.exclude was ")
    load_data(of_then, card, Progress(), begun=earlier)[0].source.load_state_dict(earlier)
