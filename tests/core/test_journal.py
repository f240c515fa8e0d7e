"""The journal: what is written is read back, and a replay finds every difference."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.core import decisions, events, journal
from rollpacker.core.codec import kinds, load_tagged
from rollpacker.core.events import EpochEnded
from rollpacker.core.journal import JournalWriter, read, replay, segments
from rollpacker.core.types import AttemptId, EngineId, Prompt, PromptId, ReplicaId, RoundKind


def _values(hint: Any) -> st.SearchStrategy[Any]:
    if get_origin(hint) is tuple:
        first, *others = get_args(hint)
        if others == [...]:
            return st.lists(_values(first)).map(tuple)
        return st.tuples(_values(first), *map(_values, others))
    finite = st.floats(allow_nan=False)
    return st.from_type(hint) if float not in (hint, *get_args(hint)) else finite


def _instances(cls: type) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls)
    return st.builds(cls, **{name: _values(hints[name]) for name in cls.__struct_fields__})


EVENTS = get_args(events.Event)
DECISIONS = get_args(decisions.Decision)
any_event = st.one_of([_instances(cls) for cls in EVENTS])
any_decision = st.one_of([_instances(cls) for cls in DECISIONS])
record = st.tuples(
    st.floats(min_value=0, max_value=1e9), any_event, st.lists(any_decision, max_size=3)
)


def decode_decision(data: dict[str, Any]) -> decisions.Decision:
    return load_tagged(data, kinds(decisions.Decision))


def finished(attempt: int, tokens: int = 5) -> events.AttemptFinished:
    return events.AttemptFinished(attempt=AttemptId(attempt), tokens=tokens, finish_reason="stop")


def through_json(item: events.Event | decisions.Decision) -> dict[str, Any]:
    """What the item looks like after a real write and read."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        writer = journal.JournalWriter(path)
        if isinstance(item, events.Event):
            writer.record(0.0, item, [])
        else:
            writer.record(0.0, finished(0), [item])
        writer.close()
        line = json.loads(path.read_text(encoding="utf-8"))
    return line["event"] if isinstance(item, events.Event) else line["decisions"][0]


@pytest.mark.parametrize("cls", EVENTS, ids=lambda cls: cls.__name__)
@settings(max_examples=settings().max_examples // 5)
@given(data=st.data())
def test_every_event_survives_a_write_and_a_read(cls: type, data: st.DataObject) -> None:
    event = data.draw(_instances(cls))
    assert journal.decode_event(through_json(event)) == event


@pytest.mark.parametrize("cls", DECISIONS, ids=lambda cls: cls.__name__)
@settings(max_examples=settings().max_examples // 5)
@given(data=st.data())
def test_every_decision_survives_a_write_and_a_read(cls: type, data: st.DataObject) -> None:
    decision = data.draw(_instances(cls))
    assert decode_decision(through_json(decision)) == decision


def test_events_and_decisions_share_no_name() -> None:
    names = [cls.__name__ for cls in (*EVENTS, *DECISIONS)]
    assert len(names) == len(set(names))


@settings(max_examples=settings().max_examples // 4)
@given(records=st.lists(record, max_size=6))
def test_a_whole_journal_reads_back_in_order(
    records: list[tuple[float, events.Event, list[decisions.Decision]]],
) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        writer = journal.JournalWriter(path)
        writer.meta({"config": {"a": 1}})
        for now, event, made in records:
            writer.record(now, event, made)
        writer.close()
        lines = list(journal.read(path))
    assert [number for number, _ in lines] == list(range(1, len(records) + 2))
    assert lines[0][1] == {"meta": {"config": {"a": 1}}, "version": 2}
    for (now, event, made), (_, line) in zip(records, lines[1:], strict=True):
        assert line["t"] == pytest.approx(now, abs=1e-6)
        assert journal.decode_event(line["event"]) == event
        assert [decode_decision(d) for d in line["decisions"]] == made


def test_an_unknown_kind_is_named_and_the_known_ones_are_listed() -> None:
    data = json.loads(json.dumps(through_json(finished(1))).replace("AttemptFinished", "Nope"))
    with pytest.raises(ValueError, match=r"'Nope'.*AttemptFinished") as error:
        journal.decode_event(data)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="'AttemptFinished'"):
        decode_decision(through_json(finished(1)))


def test_what_is_no_plain_data_is_refused(tmp_path: Path) -> None:
    writer = journal.JournalWriter(tmp_path / "journal.jsonl")
    with pytest.raises(TypeError, match="cannot write Random as JSON"):
        writer.meta({"state": random.Random(0)})
    writer.close()


@dataclass
class Echo:
    """A policy of a few lines: it numbers the responses of each prompt that is drawn."""

    started: int = 0
    short: bool = True

    def handle(self, now: float, event: events.Event) -> list[decisions.Decision]:
        match event:
            case events.StepStarted(step=step):
                kind = RoundKind.SHORT if self.short else RoundKind.FULL
                return [decisions.BeginRound(step=step, round=kind)]
            case events.AttemptFinished(attempt=attempt):
                self.started += 1
                return [decisions.GradeAttempt(attempt=attempt)]
            case events.AttemptGraded():
                return [
                    decisions.ApplyUpdate(step=1, update=update, last=update == 1)
                    for update in range(2)
                ]
            case events.PromptsDrawn(prompts=prompts):
                return [decisions.DeferPrompt(prompt=prompt) for prompt in prompts]
            case _:
                return []


def build(meta: dict[str, Any]) -> Echo:
    return Echo(short=meta["short"])


def write_run(path: Path, policy: Echo, moments: list[tuple[float, events.Event]]) -> None:
    writer = journal.JournalWriter(path)
    writer.meta({"short": policy.short})
    for now, event in moments:
        writer.record(now, event, policy.handle(now, event))
    writer.close()


MOMENTS: list[tuple[float, events.Event]] = [
    (
        0.0,
        events.StepStarted(
            step=1, engines=(EngineId(0),), replicas=(ReplicaId(0),), remaining={"math": 3}
        ),
    ),
    (0.5, events.PromptsDrawn(prompts=(Prompt(id=PromptId("p"), domain="math", tokens=7),))),
    (1.0, finished(1)),
    (2.0, finished(2)),
]


def test_a_replay_of_an_untouched_journal_has_no_difference(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write_run(path, Echo(), MOMENTS)
    result = journal.replay(path, build)
    assert (result.events, result.decisions, result.differences) == (4, 4, [])


def test_a_replay_says_within_which_step_a_journal_ends(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    graded = (3.0, events.AttemptGraded(attempt=AttemptId(1), reward=1.0))
    updates = [(4.0 + update, events.UpdateApplied(step=1, update=update)) for update in range(2)]
    write_run(path, Echo(), [*MOMENTS, graded, *updates])
    lines = path.read_text().splitlines(keepends=True)
    ends = []
    for count in range(1, len(lines) + 1):
        path.write_text("".join(lines[:count]))
        ends.append(journal.replay(path, build).unfinished)
    assert ends == [None, *[1] * (len(lines) - 2), None]


def test_a_replay_names_the_line_whose_decisions_differ(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write_run(path, Echo(), MOMENTS)
    lines = path.read_text().splitlines()
    lines[3] = lines[3].replace("GradeAttempt", "AbortAttempt")
    path.write_text("\n".join(lines) + "\n")
    (difference,) = journal.replay(path, build).differences
    assert difference["line"] == 4
    attempt = AttemptId(1)
    (written,), (replayed,) = difference["written"], difference["replayed"]
    assert decode_decision(written) == decisions.AbortAttempt(attempt=attempt)
    assert decode_decision(replayed) == decisions.GradeAttempt(attempt=attempt)


def test_every_meta_line_builds_the_policy_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write_run(path, Echo(short=True), MOMENTS)
    write_run(path, Echo(short=False), MOMENTS)
    result = journal.replay(path, build)
    assert (result.events, result.differences) == (8, [])


def test_a_line_torn_by_a_crash_is_ignored_and_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write_run(path, Echo(), MOMENTS)
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for size in range(last + 1, len(whole)):
        path.write_bytes(whole[:size])
        complete = size == len(whole) - 1
        assert len(list(journal.read(path))) == (5 if complete else 4)
        journal.JournalWriter(path).close()
        assert path.read_bytes() == whole[:last]


@pytest.mark.parametrize("torn", [0, 1, 1 << 16, 200_000])
@pytest.mark.parametrize("kept", [b"", b"{}\n", b"{}\n" * 100_000])
def test_a_torn_line_of_any_length_is_cut_off(tmp_path: Path, kept: bytes, torn: int) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(kept + b"x" * torn)
    journal.JournalWriter(path).close()
    assert path.read_bytes() == kept


def test_of_a_long_journal_only_the_end_is_read_at_a_start(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with path.open("wb") as file:
        file.seek(1 << 40)  # a hole: nobody could read it
        file.write(b"\n{}\n{")
    journal.JournalWriter(path).close()
    assert path.stat().st_size == (1 << 40) + 4


def test_a_bad_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write_run(path, Echo(), MOMENTS)
    lines = path.read_text().splitlines()
    lines[2] = lines[2][:-4]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"journal\.jsonl, line 3: not JSON") as error:
        journal.replay(path, build)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty, no meta line"),
        ('{"t":0,"event":{},"decisions":[]}\n', "line 1: expected"),
        ('{"meta":{"short":true},"version":2}\n{"t":0}\n', "line 2: expected"),
    ],
)
def test_a_file_that_is_no_journal_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        journal.replay(path, build)


class Strict:
    """Knows an attempt only from the decision that started it."""

    def __init__(self) -> None:
        self.known: dict[int, bool] = {}

    def handle(self, now: float, event: events.Event) -> list[decisions.Decision]:
        if isinstance(event, events.AttemptFinished):
            assert self.known.pop(event.attempt)
        elif isinstance(event, events.AttemptGraded):
            self.known[event.attempt] = True
        return []


def test_a_lost_line_is_a_difference_and_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    writer = journal.JournalWriter(path)
    writer.meta({})
    for event in (events.AttemptGraded(attempt=AttemptId(7), reward=1.0), finished(7)):
        writer.record(0.0, event, [])
    writer.close()
    assert journal.replay(path, lambda _: Strict()).differences == []
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([lines[0], lines[2]]) + "\n", encoding="utf-8")
    (difference,) = journal.replay(path, lambda _: Strict()).differences
    assert difference["line"] == 2
    assert difference["error"] == "KeyError: 7"


@pytest.mark.parametrize("version", ["", ',"version":1', ',"version":3'])
def test_a_journal_of_another_version_is_refused(tmp_path: Path, version: str) -> None:
    path = tmp_path / "journal.jsonl"
    write_run(path, Echo(), MOMENTS)
    path.write_text(path.read_text().replace(',"version":2', version))
    with pytest.raises(ValueError, match=r"journal\.jsonl, line 1: version . of the journal"):
        journal.replay(path, build)


def test_a_line_that_is_no_event_is_named_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write_run(path, Echo(), MOMENTS)
    text = path.read_text()
    for old, new, message in (
        ('"attempt":1,"tokens"', '"attempt":"a","tokens"', r"line 4: AttemptFinished: .*attempt"),
        ('"attempt":1,"tokens"', '"tokens"', r"line 4: AttemptFinished: .*`attempt`"),
        ('"AttemptFinished"', '"Nope"', r"line 4: unknown kind 'Nope'"),
    ):
        path.write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=message) as error:
            journal.replay(path, build)
        assert "\n" not in str(error.value)


# --- test journal segments: A bounded journal: segments that replay alone, gaps of a full disk,
# journals without either.

SETTINGS = {"settings": {}, "state": {}}


class Silent:
    """A policy that decides nothing."""

    def handle(self, now, event):
        return []


def rebuilt(meta):
    assert set(meta) == {"settings", "state"}
    return Silent()


def write(path: Path, steps: int, most: float, lines: int = 20) -> JournalWriter:
    writer = JournalWriter(path)
    writer.meta(SETTINGS)
    for step in range(steps):
        for _ in range(lines):
            writer.record(float(step), EpochEnded(epoch=step), [])
        writer.flush()
        writer.turn(lambda: SETTINGS, most)
    writer.close()
    return writer


def test_it_stays_bounded_over_ten_thousand_steps(tmp_path: Path) -> None:
    path, most = tmp_path / "journal.jsonl", 100_000
    write(path, 10_000, most)
    parts = segments(path)
    assert parts[-1] == path
    assert 7 <= len(parts) <= 9
    assert sum(part.stat().st_size for part in tmp_path.iterdir()) <= most * 1.05
    epochs = [line["event"]["epoch"] for p in parts for _, line in read(p) if "event" in line]
    assert epochs == sorted(epochs)
    assert epochs[-1] == 9_999
    assert set(epochs) == set(range(epochs[0], 10_000))
    for part in parts:
        assert "meta" in next(iter(read(part)))[1]
        assert replay(part, rebuilt).differences == []
    whole = replay(path, rebuilt)
    assert whole.events == len(epochs)


def test_it_goes_on_in_its_segments_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, 60, 300_000)
    before = segments(path)
    write(path, 60, 300_000)
    assert segments(path)[: len(before) - 1] == before[:-1]
    assert len(segments(path)) > len(before)
    assert replay(path, rebuilt).events == 2 * 60 * 20


def test_without_a_limit_it_is_one_file(tmp_path: Path) -> None:
    write(tmp_path / "journal.jsonl", 50, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["journal.jsonl"]
    assert replay(tmp_path / "journal.jsonl", rebuilt).events == 1000


def test_a_full_disk_leaves_a_gap_between_whole_lines(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    path = tmp_path / "journal.jsonl"
    errors: list[OSError] = []
    writer = JournalWriter(path, errors.append)
    writer.meta(SETTINGS)
    writer.record(1.0, EpochEnded(epoch=1), [])
    writer.flush()
    file, writer._file = writer._file, open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    writer._file.truncate = file.truncate  # type: ignore[method-assign]
    writer.record(2.0, EpochEnded(epoch=2), [])
    writer.flush()
    writer.record(3.0, EpochEnded(epoch=3), [])
    writer.flush()
    writer._file = file
    writer.turn(lambda: SETTINGS, 0)
    writer.record(4.0, EpochEnded(epoch=4), [])
    writer.close()
    assert len(errors) == 1
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"]["epoch"] for line in lines if "event" in line] == [1, 4]
    assert replay(path, rebuilt).events == 2


def test_a_turn_loses_no_line_that_waits(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    writer = JournalWriter(path)
    writer.meta(SETTINGS)
    for epoch in range(20):
        writer.record(float(epoch), EpochEnded(epoch=epoch), [])
    writer.turn(lambda: SETTINGS, 2000)
    writer.close()
    assert len(segments(path)) == 2
    assert replay(path, rebuilt).events == 20


def full(path: Path, writer: JournalWriter) -> None:
    """It takes no byte, and cannot be cut either."""
    writer._file.close()
    writer._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115


def stays(path: Path, writer: JournalWriter) -> None:
    """The oldest segment cannot be removed."""
    (path.parent / "journal-00001.jsonl").mkdir()


def gone(path: Path, writer: JournalWriter) -> None:
    path.unlink()


@pytest.mark.parametrize("harm", [full, stays, gone])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_who_goes_on_without_it_is_told_and_never_ended(
    tmp_path: Path, harm: Callable[[Path, JournalWriter], None]
) -> None:
    """Whatever of the journal's upkeep fails; without ``on_error`` it is raised."""
    for errors in ([], None):
        path = tmp_path / f"{errors is None}" / "journal.jsonl"
        path.parent.mkdir()
        writer = JournalWriter(path, None if errors is None else errors.append)
        writer.meta(SETTINGS)
        harm(path, writer)
        writer.record(1.0, EpochEnded(epoch=1), [])
        if errors is None:
            with pytest.raises(OSError, match=r"space|directory"):
                writer.turn(lambda: SETTINGS, 1)
            continue
        for step in range(3):
            writer.turn(lambda: SETTINGS, 1)
            writer.record(2.0 + step, EpochEnded(epoch=2), [])
        writer.close()
        assert errors
        if harm is stays:
            (path.parent / "journal-00001.jsonl").rmdir()
            assert replay(path, rebuilt).events == 4
