"""A run that was stopped goes on as if it had not been: same samples, same bytes."""

import shutil
from collections import Counter
from pathlib import Path

import pytest
from runtime_jobs import (
    Workshop,
    checkpoints,
    cli_here,
    kept_groups,
    kept_samples,
    largest_difference,
    metrics,
    one_line,
    run,
    times_trained,
    weights_digest,
)

from rollpacker.core import journal
from rollpacker.job.run.lock import RunLock
from rollpacker.policy.rollout import from_journal

ROWS = 11
FIXED = {"deterministic": True, "devices__per_node": 1, "checkpoint": {"every": 1, "keep": 9}}
shop = Workshop.fixture(rows=ROWS)


def uninterrupted(shop: Workshop, mode: str) -> tuple[Path, Path]:
    """The YAML file and the folder of a whole run that keeps every checkpoint."""
    file = shop.file(mode, mode, **FIXED)
    folder, _ = run(shop.config(mode, mode, **FIXED))
    return file, folder


def crashed_copy(folder: Path, name: str, step: int) -> Path:
    """The run as a kill during step ``step`` + 1 leaves it: later lines, no later checkpoint."""
    copy = folder.parent / name
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(".lock", "summary.json"))
    for later in checkpoints(copy):
        if later > step:
            shutil.rmtree(copy / f"checkpoint-{later}")
    return copy


def assert_same(folder: Path, other: Path, last: int) -> None:
    assert kept_samples(folder) == kept_samples(other)
    name = f"checkpoint-{last}"
    assert weights_digest(folder / name) == weights_digest(other / name)
    losses = [[row["loss"] for row in metrics(f)] for f in (folder, other)]
    assert losses[0] == losses[1]


@pytest.fixture(scope="module")
def race(shop: Workshop) -> tuple[Path, Path]:
    return uninterrupted(shop, "race")


def resume(shop: Workshop, mode: str, copy: Path) -> str:
    _, said = run(shop.config(copy.name, mode, **FIXED), resume=True)
    return said


def test_resume_is_exact_and_passes_over_a_damaged_checkpoint(
    race: tuple[Path, Path], shop: Workshop
) -> None:
    """Mode race, from inside the first epoch; the newest checkpoint has a flipped bit."""
    folder = race[1]
    copy = crashed_copy(folder, "flipped", 2)
    weights = next((copy / "checkpoint-2").rglob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    said = resume(shop, "race", copy)
    assert "checkpoint-2 is not usable" in said
    assert "safetensors changed. An older checkpoint is used." in said
    assert "1 of them done before" in said
    assert_same(copy, folder, checkpoints(folder)[-1])
    replay = journal.replay(copy / "journal.jsonl", from_journal)
    assert replay.differences == []


def test_a_folder_with_a_run_is_not_overwritten(race: tuple[Path, Path], shop: Workshop) -> None:
    with pytest.raises(ValueError, match="holds a run already: continue it with --resume auto"):
        run(shop.config("race", "race", **FIXED))


def test_a_run_without_a_checkpoint_says_that_it_would_start_anew(shop: Workshop) -> None:
    folder = shop.folder / "begun"
    folder.mkdir()
    (folder / "journal.jsonl").write_text("")
    with pytest.raises(ValueError, match="has no checkpoint: start it anew there with --resume"):
        run(shop.config("begun"))


def test_another_configuration_is_refused(race: tuple[Path, Path], shop: Workshop) -> None:
    config = shop.config("race", "race", **FIXED, train__beta=0.5)
    with pytest.raises(ValueError, match=r"'train\.beta' was 0\.0, now 0\.5"):
        run(config, resume=True)


def test_a_second_start_is_refused(race: tuple[Path, Path]) -> None:
    with RunLock(race[1]):
        done = cli_here("train", race[0], "--resume", "auto")
    assert done.returncode == 2
    assert "another run (pid " in one_line(done)


@pytest.mark.slow
def test_a_finished_run_stays_as_it_is(race: tuple[Path, Path], shop: Workshop) -> None:
    folder = race[1]
    before = kept_samples(folder), checkpoints(folder)
    said = resume(shop, "race", folder)
    assert "6 of them done before" in said
    assert (kept_samples(folder), checkpoints(folder)) == before


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["off", "race", "exact"])
def test_resume_from_every_step(shop: Workshop, mode: str) -> None:
    """The epoch ends after step 3: resumed there, the next epoch begins."""
    shop = Workshop(shop.folder / f"again-{mode}", rows=ROWS)
    _, folder = uninterrupted(shop, mode)
    steps = checkpoints(folder)
    for step in steps[:-1]:
        copy = crashed_copy(folder, f"{mode}-{step}", step)
        assert f"{step} of them done before" in resume(shop, mode, copy)
        assert_same(copy, folder, steps[-1])


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["torn", "missing", "manifest", "state", "all"])
def test_damaged_checkpoints(race: tuple[Path, Path], shop: Workshop, damage: str) -> None:
    copy = crashed_copy(race[1], f"damaged-{damage}", 2)
    newest = copy / "checkpoint-2"
    weights = next(newest.rglob("*.safetensors"))
    match damage:
        case "torn":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "missing":
            weights.unlink()
        case "manifest":
            (newest / "MANIFEST").unlink()
        case "state":
            (newest / "state.json").write_text("{}")
        case _:
            for step in (1, 2):
                (copy / f"checkpoint-{step}" / "MANIFEST").write_text("{}")
    said = resume(shop, "race", copy)
    assert "checkpoint-2 is not usable" in said
    assert ("1 of them done before" in said) == (damage != "all")
    assert_same(copy, race[1], 6)


@pytest.mark.slow
def test_more_epochs_go_on_at_the_boundary(shop: Workshop) -> None:
    """A run of one epoch that is resumed with two equals a run of two."""
    other = Workshop(shop.folder / "epochs", rows=ROWS)
    folder, _ = run(other.config("two", "race", **FIXED))
    run(other.config("one", "race", **FIXED, epochs=1))
    copy, said = run(other.config("one", "race", **FIXED, epochs=2), resume=True)
    assert "3 of them done before" in said
    assert_same(copy, folder, checkpoints(folder)[-1])


@pytest.mark.slow
def test_two_workers_resume(shop: Workshop) -> None:
    folder, _ = run(shop.config("two", devices__per_node=2, checkpoint={"every": 1, "keep": 9}))
    copy = crashed_copy(folder, "two-crashed", 2)
    run(
        shop.config("two-crashed", devices__per_node=2, checkpoint={"every": 1, "keep": 9}),
        resume=True,
    )
    assert set(kept_groups(copy).values()) == {3}
    assert times_trained(copy) == Counter({f"p{i}": 2 for i in range(ROWS)})
    assert largest_difference(folder / "checkpoint-3", copy / "checkpoint-3") <= 1e-5
