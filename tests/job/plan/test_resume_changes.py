"""What may change when a run goes on: all that leaves its samples as they are."""

import json
from pathlib import Path
from typing import Any

import pytest
from runtime_jobs import Workshop, kept_samples, run, weights_digest

from rollpacker import config
from rollpacker.job.plan.resume import choose_start
from rollpacker.runtime.record.checkpoint import VerifiedCheckpoint

shop = Workshop.fixture()


def changed(began: dict[str, Any], now: dict[str, Any], cwd: Path | None = None) -> tuple[str, ...]:
    """What is said of a run that began with one configuration and goes on with another."""
    state: dict[str, Any] = {"config": config.parse(began).model_dump(mode="json")}
    state |= {"counters": {"step": 3}} | ({} if cwd is None else {"cwd": str(cwd)})
    state |= {"code": {}}
    found = VerifiedCheckpoint(
        step=3, path=Path("checkpoint-3"), state=json.loads(json.dumps(state))
    )
    return choose_start(config.parse(now), Path("run"), found, resume=True).changed


def test_what_one_changes_after_running_out_of_memory(shop: Workshop) -> None:
    free = {
        "grading__workers": 4,
        "train__gradient_checkpointing": True,
        "rollout__speculation": {"mode": "off"},
        "checkpoint": {"every": 2},
        "eval": {"data": {"path": "elsewhere"}},
    }
    assert changed(shop.tree("a"), shop.tree("b", **free)) == ()
    (line,) = changed(
        shop.tree("a"),
        shop.tree("b", train__micro_batch_tokens=256, engine__kv_tokens=640, devices__per_node=2),
    )
    assert line.startswith("WARNING ")
    for part in (
        "engine.kv_tokens was 0 and is 640",
        "train.micro_batch_tokens was 1024 and is 256",
        "devices.per_node was 1 and is 2",
        "rounding",
    ):
        assert part in line


def test_another_member_of_a_union_is_one_change(shop: Workshop) -> None:
    (line,) = changed(shop.tree("a"), shop.tree("b", engine={"kind": "vllm", "gpu_memory": 0.3}))
    assert line.startswith("WARNING engine.kind was 'mini' and is 'vllm': ")
    with pytest.raises(ValueError, match=r"'train\.algorithm\.kind' was 'grpo', now 'rloo'"):
        changed(shop.tree("a"), shop.tree("b", train__algorithm={"kind": "rloo"}))


def test_other_problems_to_measure_by(shop: Workshop) -> None:
    began, now = (
        shop.tree(name, eval={"data": {"path": name, "size": size}})
        for name, size in (("a", 0), ("b", 5))
    )
    assert changed(began, now) == ()
    assert changed(began, shop.tree("a")) == ()


@pytest.mark.parametrize("began", [{}, {"eval": {"data": {"path": "a"}}}])
def test_what_is_held_out_is_not_trained_on(shop: Workshop, began: dict[str, Any]) -> None:
    trees = shop.tree("a", **began), shop.tree("a", eval={"fraction": 0.2})
    for before, now in (trees, trees[::-1]):
        with pytest.raises(ValueError, match=r"another config: 'eval\.fraction' was "):
            changed(before, now)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_schedule_has_an_end(shop: Workshop, schedule: str) -> None:
    began = shop.tree("a", train__lr_scheduler_type=schedule)
    expected = ["steps was 0 and is 9 from here on", "epochs was 2 and is 3 from here on"]
    now = shop.tree("a", train__lr_scheduler_type=schedule, steps=9, epochs=3)
    assert changed(began, now) == tuple(expected if schedule != "constant" else [])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("grading__retries", 5),
        ("rollout__max_retries", 5),
        ("environment__step_timeout_s", 5.0),
        ("environment__start_timeout_s", 5.0),
    ],
)
def test_what_decides_whether_a_response_is_replaced_is_said(
    shop: Workshop, key: str, value: Any
) -> None:
    environment = {"kind": "tools", "path": "tools.py:tools"}
    (line,) = changed(
        shop.tree("a", environment=environment),
        shop.tree("a", **{"environment": environment, key: value}),
    )
    assert line.startswith(f"{key.replace('__', '.')} was ")
    assert line.endswith(f" and is {value!r} from here on")


def test_an_engine_that_decodes_nothing_is_another_run(shop: Workshop) -> None:
    trees = shop.tree("a"), shop.tree("a", engine={"kind": "fake"})
    for before, now in (trees, trees[::-1]):
        with pytest.raises(ValueError, match=r"another config: 'engine\.kind' was"):
            changed(before, now)


def test_items_of_a_list_are_compared_one_by_one(shop: Workshop) -> None:
    began = shop.tree("a")
    now = shop.tree("a")
    now["rewards"][0] |= {"timeout_s": 60.0, "on_error": "skip", "batch": 4}
    said = changed(began, now)
    assert said[0] == "rewards.0.timeout_s was None and is 60.0 from here on"
    assert said[1] == "rewards.0.on_error was 'stop' and is 'skip' from here on"
    assert said[2].startswith("WARNING rewards.0.batch was None and is 4: ")
    now["rewards"][0]["weight"] = 2.0
    with pytest.raises(
        ValueError, match=r"'rewards\.0\.weight' was 1\.0, now 2\.0: change it back"
    ):
        changed(began, now)
    with pytest.raises(ValueError, match=r"another config: 'rewards' was"):
        changed(began, began | {"rewards": began["rewards"] * 2})


def test_another_spelling_of_a_path_is_no_change(
    shop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = shop.tree("a", data__path=[str(shop.data)])
    (tmp_path / "link").symlink_to(shop.folder)
    now = shop.tree("a", data__path=["link/rows.jsonl"], model__path="./link/model")
    now["rewards"][0]["function"] = "link/judges.py:ones"
    monkeypatch.chdir(tmp_path)
    assert changed(began, now) == ()
    # As it was spelled where the run was started.
    relative = shop.tree("a", data__path="rows.jsonl", model__path="model")
    monkeypatch.chdir(tmp_path / "link" / "model")
    assert changed(relative, shop.tree("a"), cwd=shop.folder) == ()
    with pytest.raises(ValueError, match=r"'(data|model)\.path' was"):
        changed(relative, shop.tree("a"), cwd=tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("data__path", "other.jsonl"), ("model__path", "org/name"), ("data__exclude", "rows.jsonl")],
)
def test_another_file_is_refused(
    key: str, value: str, shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shop.folder)
    (shop.folder / "other.jsonl").touch()
    with pytest.raises(ValueError, match=key.replace("__", r"\.")):
        changed(shop.tree("a"), shop.tree("a", **{key: value}))
    now = shop.tree("a")
    now["rewards"][0]["function"] = f"{shop.rewards}:faulty"
    with pytest.raises(ValueError, match=r"rewards\.0\.function"):
        changed(shop.tree("a"), now)


def test_a_run_that_goes_on_with_free_changes_ends_with_the_same_bits(shop: Workshop) -> None:
    whole, _ = run(shop.config("whole", steps=3, deterministic=True))
    run(shop.config("parts", steps=1, deterministic=True))
    again = shop.config(
        "parts",
        steps=3,
        deterministic=True,
        grading__workers=2,
        train__gradient_checkpointing=True,
        rollout__speculation={"mode": "off"},
        model__path=f"{shop.model}/../model",
    )
    parts, said = run(again, resume=True)
    assert "WARNING" not in said
    assert kept_samples(parts) == kept_samples(whole)
    assert weights_digest(parts / "checkpoint-3") == weights_digest(whole / "checkpoint-3")


def test_code_that_was_edited_in_its_place_is_said(shop: Workshop) -> None:
    file = shop.folder / "mine.py"
    score = "def score(completions, **_):\n    return [{} for _ in completions]\n"
    file.write_text(score.format("float(len(_))"))
    changes = {"rewards": [{"function": f"{file}:score"}], "steps": 1}
    run(shop.config("edited", **changes))
    _, said = run(shop.config("edited", **changes | {"steps": 2}), resume=True)
    assert "edited" not in said.replace("/edited", "")
    file.write_text(score.format("0.5 * len(_)"))
    _, said = run(shop.config("edited", **changes | {"steps": 3}), resume=True)
    assert "WARNING rewards.0.function: its file has been edited, so" in said
