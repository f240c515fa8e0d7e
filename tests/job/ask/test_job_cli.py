"""``rollpacker train`` from a terminal: files of other frameworks, Ctrl-C, resume, ``--json``."""

import json
import multiprocessing
import os
import signal
import time
from io import StringIO
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from rich.console import Console
from runtime_jobs import (
    Workshop,
    checkpoints,
    cli_here,
    start_cli,
    table,
    times_trained,
    write_byte_model,
)

from rollpacker.job import train
from rollpacker.runtime.record.progress import Progress
from rollpacker.runtime.step.phase_nodes import OwnNodes

ROWS = 7
SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."


def roll_rows() -> list[dict[str, Any]]:
    """Of the shape of ROLL's math data; ``messages`` is JSON in a string."""
    rows: list[dict[str, Any]] = []
    for number in range(ROWS):
        question = f"What is ${number} + 1$?"
        turns = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        rows.append(
            {
                "id": str(4988 + number),
                "domain": "math_rule",
                "source": "deepmath_103k",
                "difficulty": "1.0",
                "prompt": question,
                "messages": json.dumps(turns),
                "ground_truth": str(number + 1),
                "case_type": "",
                "test_case_function": "",
                "test_cases": "",
                "tag": "deepmath_103k",
            }
        )
    return rows


def verl_rows() -> list[dict[str, Any]]:
    return [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {number} + 1?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
            "extra_info": {"split": "train", "index": number},
        }
        for number in range(ROWS)
    ]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    shop = Workshop(tmp_path_factory.mktemp("train"))
    write_byte_model(shop.folder / "bytes", end="<|endoftext|>")
    text = "".join(json.dumps(row) + "\n" for row in roll_rows())
    (shop.folder / "roll.jsonl").write_text(text, encoding="utf-8")
    pl.DataFrame(verl_rows()).write_parquet(shop.folder / "verl.parquet")
    return shop


def job(shop: Workshop, name: str, data: str, **changes: Any) -> Path:
    return shop.file(
        name,
        model__path=str(shop.folder / "bytes"),
        data__path=str(shop.folder / data),
        rewards=[{"function": "math"}],
        devices__per_node=1,
        rollout__max_completion_length=24,
        checkpoint={"every": 1},
        **changes,
    )


def wait_for_step(folder: Path, step: int, seconds: float) -> None:
    path = folder / "metrics.jsonl"
    end = time.monotonic() + seconds
    while not path.exists() or path.read_bytes().count(b"\n") <= step:
        assert time.monotonic() < end, "no step was made"
        time.sleep(0.02)


@pytest.mark.wide
def test_ctrl_c_saves_and_resume_ends_the_run(shop: Workshop) -> None:
    """A ROLL file: interrupted (exit 130, ``interrupted`` in the summary), then resumed."""
    file = job(shop, "roll", "roll.jsonl", epochs=500)
    folder = shop.folder / "roll"
    process = start_cli("train", file, "--json")
    wait_for_step(folder, 2, 120)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    summary = json.loads(out)
    assert summary["interrupted"]
    assert "interrupted: finishing the step, then a checkpoint" in err
    assert "roll.jsonl: 7 rows, ROLL: prompt <- messages, answer <- ground_truth" in err
    assert "its chat template ends a turn with '<|im_end|>', but responses end only with" in err
    steps = summary["steps"]
    assert checkpoints(folder)[-1] == steps
    assert set(table(folder)["step"]) == set(range(steps))

    steps += steps % 2
    done = cli_here("train", file, f"steps={steps + 2}", "--resume", "auto", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert not summary["interrupted"]
    assert summary["steps"] == steps + 2
    times = times_trained(folder)
    assert sum(times.values()) == summary["prompts_trained"]
    assert max(times.values()) - min(times.values()) <= 1
    assert set(table(folder, "kept")["reward"]) <= {0.0, 1.0}


@pytest.mark.slow
def test_verl_parquet(shop: Workshop) -> None:
    done = cli_here("train", job(shop, "verl", "verl.parquet", epochs=1), "--json")
    assert done.returncode == 0, done.stderr
    assert "verl: prompt <- prompt, answer <- reward_model.ground_truth" in done.stderr
    assert json.loads(done.stdout)["prompts_trained"] == ROWS
    again = cli_here("train", shop.folder / "verl.yaml", "epochs=2", "--resume", "auto", "--json")
    assert json.loads(again.stdout)["prompts_trained"] == 2 * ROWS


def test_json_of_the_other_commands(shop: Workshop) -> None:
    """On the run that the test above has left, or on a fresh one when it is run alone."""
    folder = shop.folder / "roll"
    if not (folder / "summary.json").exists():
        cli_here("train", job(shop, "roll", "roll.jsonl", epochs=1))
    done = cli_here("journal", "replay", folder / "journal.jsonl", "--json")
    assert done.returncode == 0, done.stderr
    replay = json.loads(done.stdout)
    counts = {"events", "decisions", "differences", "unfinished_step"}
    assert set(replay) == counts | {"first_differences"}
    assert replay["unfinished_step"] is None
    assert replay["differences"] == 0
    assert replay["events"] > 0

    done = cli_here("report", folder, "--json")
    assert done.returncode == 0, done.stderr
    written = json.loads(done.stdout)
    assert set(written) == {"report", "timeline"}
    assert all(Path(path).stat().st_size > 1000 for path in written.values())


def test_doctor() -> None:
    done = cli_here("doctor", "--json")
    checks = json.loads(done.stdout)["checks"]
    assert {"name", "ok", "detail", "fix"} <= set(checks[0])
    assert done.returncode == (0 if all(check["ok"] for check in checks) else 1)


def test_a_changed_journal_fails(shop: Workshop, tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    lines = (shop.folder / "roll" / "journal.jsonl").read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if '"StartAttempt"' in line)
    lines[place] = lines[place].replace('"engine":0', '"engine":1', 1)
    journal.write_text("\n".join(lines) + "\n")
    done = cli_here("journal", "replay", journal, "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["differences"] == len(found["first_differences"]) == 1
    told = cli_here("journal", "replay", journal).stdout.splitlines()
    assert told[1].startswith(f"line {place + 1}: the policy decides otherwise than the journal")
    assert "rule" not in told[1]
    assert '"engine": 1' in told[2]
    journal.write_text("nonsense\n")
    done = cli_here("journal", "replay", journal)
    assert done.returncode == 2
    assert done.stderr.startswith("rollpacker: ")
    assert len(done.stderr.splitlines()) == 1


def test_what_fails_when_the_workers_are_there_ends_them(tmp_path: Path) -> None:
    """They take no signals: a run that left them behind would wait for them for ever."""
    shop = Workshop(tmp_path, rows=4)
    (tmp_path / "run" / "workers.jsonl").mkdir(parents=True)
    done = cli_here("train", shop.file("run", devices__per_node=1))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("rollpacker: ")
    assert "workers.jsonl" in done.stderr
    assert not multiprocessing.active_children()


def test_nodes_that_cannot_be_left_keep_no_worker(tmp_path: Path) -> None:
    class Stuck(OwnNodes):
        async def close(self, *, displaced: bool = False) -> None:
            raise RuntimeError("no way out")

    shop = Workshop(tmp_path, rows=4)
    config = shop.config("run", devices__per_node=1, steps=1)
    with pytest.raises(RuntimeError, match="no way out"):
        train(config, progress=Progress(Console(file=StringIO())), phases=Stuck())
    assert not multiprocessing.active_children()
    assert (tmp_path / "run" / "samples").exists()
