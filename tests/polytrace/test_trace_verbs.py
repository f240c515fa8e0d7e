"""``rollpacker trace characterize|fit|generate|models|compare``."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from trace_lines import dump, timing

from rollpacker.cli import main
from rollpacker.polytrace import formats
from rollpacker.polytrace.compare import TimedSteps, compare, read_timed
from rollpacker.polytrace.describe import characterize
from rollpacker.polytrace.formats.ours.native import concat
from rollpacker.polytrace.model.fit import fit
from rollpacker.polytrace.model.workload import generate, load_model, model_names
from rollpacker.polytrace.schema import TraceError

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run ``rollpacker trace`` as its entry point does: exit code, standard output and error."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rollpacker", "trace", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return run


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "search.parquet"
    formats.write(generate(load_model("search"), steps=3, seed=4), path, "native")
    return path


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "two.parquet"
    made = [generate(load_model(name), steps=2, prompts=16) for name in ("math", "code")]
    formats.write(concat(made), path, "native")
    return path


def test_characterize_prints_numbers_and_sentences(call: Call, search: Path) -> None:
    code, out, err = call("characterize", search)
    assert (code, err) == (0, "")
    table, _, sentences = out.partition("\nsearch\n")
    assert "1,440" in table
    assert "prefix_cache_share" in table
    assert "reward_time_share" not in table
    told, _, estimate = sentences.partition("\n\n")
    assert all(line.startswith("- ") for line in told.splitlines())
    assert "gain" not in told, "gains are simulated (estimate), not guessed from lengths"
    assert estimate.split()[-3:] == ["estimate", "--from", str(search)]


def test_characterize_json_is_what_the_library_says(call: Call, two: Path) -> None:
    found = json.loads(call("characterize", two, "--json")[1])["tasks"]
    assert list(found) == ["math", "code"]
    told = asdict(characterize(formats.read(two))["math"])
    assert found["math"].pop("sentences")
    assert found["math"] == json.loads(json.dumps(told))


def test_layout_changes_who_waits(call: Call, search: Path) -> None:
    idle = [
        json.loads(call("characterize", search, "--workers", workers, "--json")[1])["tasks"][
            "search"
        ]["idle_fraction"]
        for workers in (1, 16)
    ]
    assert idle[0] == 0.0
    assert idle[1] > 0.3


def test_json_has_no_nan(call: Call, tmp_path: Path) -> None:
    """One response a prompt: correlations are unknown."""
    path = tmp_path / "one.parquet"
    formats.write(generate(load_model("math"), steps=2, responses=1), path, "native")
    code, out, _ = call("fit", path, "--out", tmp_path / "m.json", "--json")
    assert code == 0
    assert json.loads(out)["goodness"]["icc"] is None


def test_html_holds_the_sentences(call: Call, search: Path, tmp_path: Path) -> None:
    page = tmp_path / "deep" / "page.html"
    code, out, _ = call("characterize", search, "--html", page, "--json")
    assert code == 0
    told = json.loads(out)
    assert told["html"] == str(page)
    text = page.read_text(encoding="utf-8")
    assert told["tasks"]["search"]["sentences"][0][1:] in text


BASE = """
import sys

class Absent:
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in {"torch", "plotly", "jinja2"}:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)

sys.meta_path.insert(0, Absent())
from rollpacker.cli import main

trace = sys.argv[1]
page = f"{trace}.html"
for words in ("--help", f"characterize {trace} --json", f"characterize {trace} --html {page}"):
    sys.argv = ["rollpacker", "trace", *words.split()]
    try:
        main()
    except SystemExit as left:
        loaded = sorted({"polars", "numpy", "scipy"} & {*sys.modules})
        print("=", left.code or 0, *(loaded if words == "--help" else []))
"""


@pytest.mark.wide
def test_the_base_install_describes_and_names_the_extra_of_pages(search: Path) -> None:
    """And its help loads no tables."""
    command = [sys.executable, "-c", BASE, str(search)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    told, found, page, _ = re.split(r"^= (?=\d)", done.stdout, flags=re.MULTILINE)
    verbs = ("import", "export", "validate", "characterize", "fit", "generate", "models", "compare")
    assert all(verb in told for verb in verbs)
    no_tables, found = found.split("\n", 1)
    assert no_tables == "0"
    described, page = json.loads(found), page.split("\n", 1)
    assert described["tasks"]["search"]["responses"] == 1440
    assert page == ["0", ""]
    assert done.stdout.endswith("= 2\n")
    (line,) = done.stderr.splitlines()
    assert "pip install 'rollpacker[report]'" in line


def test_fit_then_generate(call: Call, search: Path, two: Path, tmp_path: Path) -> None:
    model, again = tmp_path / "sub" / "m.json", tmp_path / "again.parquet"
    code, out, _ = call("fit", search, "--out", model, "--json")
    assert code == 0
    told = json.loads(out)
    expected = fit(formats.read(search))["search"]
    assert told["goodness"]["ks"] == pytest.approx(expected.goodness.ks)
    assert load_model(model) == expected.model
    words = ("fit", two, "--task", "math", "--out", tmp_path / "math.json")
    code, out, _ = call(*words)
    assert "p99" in out
    assert "A trace of few responses varies more" in " ".join(out.split())
    assert str(words[-1]) in out
    code, out, _ = call("generate", model, "--out", again, "--steps", 5, "--seed", 7, "--json")
    assert code == 0
    assert json.loads(out)["tasks"]["search"]["responses"] == 5 * 60 * 8
    same = generate(expected.model, steps=5, seed=7)
    assert formats.read(again).samples.equals(same.samples)


@pytest.mark.wide
def test_fit_takes_one_task_of_several(call: Call, two: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.json"
    code, _, err = call("fit", two, "--out", out)
    assert code == 2
    assert "several tasks: name one with --task: math, code" in err
    code, _, err = call("fit", two, "--out", out, "--task", "cod")
    assert code == 2
    assert "did you mean 'code'?" in err
    assert not out.exists()
    assert call("fit", two, "--out", out, "--task", "code")[0] == 0
    assert load_model(out).task == "code"


def test_generate_writes_other_formats_and_shapes(call: Call, tmp_path: Path) -> None:
    words = ("generate", "math", "--steps", 2, "--prompts", 3, "--responses", 5)
    code, out, _ = call(*words, "--out", tmp_path / "t", "--format", "polytrace", "--json")
    assert code == 0
    assert [Path(file).name for file in json.loads(out)["files"]] == [
        "packed_lengths_step_0.jsonl",
        "packed_lengths_step_1.jsonl",
    ]
    samples = formats.read(tmp_path / "t").samples
    sizes = samples.group_by("step", "prompt").agg(pl.len())
    assert sizes["len"].to_list() == [5] * 6
    code, out, _ = call(*words, "--out", tmp_path / "t.parquet")
    assert out.startswith("math: 30 responses of 6 prompts over 2 steps, mean ")


def test_models_lists_what_ships(call: Call) -> None:
    code, out, _ = call("models", "--json")
    assert code == 0
    assert [row["name"] for row in json.loads(out)["models"]] == model_names()
    code, out, _ = call("models")
    assert all(name in out for name in model_names())


def mistakes(folder: Path) -> dict[str, tuple[object, ...]]:
    (folder / "empty.jsonl").touch()
    (folder / "nothing").mkdir()
    (folder / "data.parquet").write_bytes(b"PAR1\xff\xfe")
    (folder / "bad.json").write_text("{}")
    dump(folder / "rewards" / "reward_timings_step_0.jsonl", timing())
    x = ("--out", folder / "x.parquet")
    return {
        "gone: no such file or folder": ("characterize", folder / "gone"),
        "nothing: no files of a trace in this folder": ("characterize", folder / "nothing"),
        "empty.jsonl: the file is empty": ("fit", folder / "empty.jsonl", *x),
        "rewards: no responses in it, only reward timings": ("characterize", folder / "rewards"),
        "unknown format 'csv'": ("characterize", folder / "gone", "--format", "csv"),
        "no workload model 'mth' (did you mean 'math'?)": ("generate", "mth", *x, "--steps", 1),
        "bad.json: task: Field required": ("generate", folder / "bad.json", *x, "--steps", 1),
        "data.parquet: not a workload model": (
            "generate",
            folder / "data.parquet",
            *x,
            "--steps",
            1,
        ),
        "--steps 0: must be at least 1": ("generate", "math", *x, "--steps", 0),
        "--prompts 0: must": ("generate", "math", *x, "--steps", 1, "--prompts", 0),
        "--seed -1: must be at least 0": ("generate", "math", *x, "--steps", 1, "--seed", -1),
        "cannot write 'cvs'": ("generate", "math", *x, "--steps", 1, "--format", "cvs"),
        "workers and slots must be at least 1": ("characterize", "x", "--workers", 0),
        "gone: no such file": ("compare", folder / "gone", folder / "empty.jsonl"),
        "metrics.jsonl: no such file (is this": ("compare", folder / "nothing", folder),
        "for those, rollpacker trace characterize": ("compare", folder / "data.parquet", folder),
        "bad.json: no list step_s": ("compare", folder / "bad.json", folder / "empty.jsonl"),
        "empty.jsonl: no steps in it": ("compare", folder / "empty.jsonl", folder / "gone"),
    }


def test_mistakes_are_one_line_and_exit_2(call: Call, tmp_path: Path) -> None:
    for part, words in mistakes(tmp_path).items():
        code, out, err = call(*words)
        assert (code, out) == (2, ""), words
        (line,) = err.splitlines()
        assert part in line
    assert not (tmp_path / "x.parquet").exists()


def metrics(path: Path, rows: dict[int, tuple[float, float, float]], torn: str = "") -> Path:
    lines: list[dict[str, Any]] = [
        {"step": step, "step_time": whole, "timing_s/rollout": r, "timing_s/train": t, "reward": 1}
        for step, (whole, r, t) in rows.items()
    ]
    dump(path, *lines)
    path.write_text(path.read_text() + torn)
    return path


def timed(source: str, **phases: tuple[float, ...]) -> TimedSteps:
    return TimedSteps(source=source, steps=tuple(range(len(phases["step"]))), phases=phases)


def test_compare_is_one_minus_the_relative_error() -> None:
    found = compare(
        timed("A", step=(9.0, 12.0, 10.0), rollout=(5.0, 0.0, 3.0), sync=(1.0, 1.0, 1.0)),
        timed("B", step=(10.0, 10.0, 10.0), rollout=(4.0, 0.0, 4.0), train=(1.0, 1.0, 1.0)),
    )
    assert found.steps == pytest.approx((0.9, 0.8, 1.0))
    assert found.accuracy_mean == pytest.approx(0.9)
    assert found.accuracy_worst == pytest.approx(0.8)
    assert found.total == pytest.approx(1 - 1 / 30)
    assert list(found.phases) == ["rollout"]
    assert found.phases["rollout"].mean == pytest.approx((0.75 + 1 + 0.75) / 3)
    assert found.phases["rollout"].worst == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("predicted", "measured", "message"),
    [
        ((1.0,), (1.0,) * 3, "predicted lacks steps 1, 2 of measured$"),
        ((1.0,) * 9, (1.0,), "measured lacks steps 1, 2, 3, 4, 5 and 3 more of predicted$"),
        ((1.0, 2.0), (1.0, 0.0), "step 1: step measured as 0 s"),
        ((0.0,), (0.0,), "step 0: step measured as 0 s"),
        ((float("nan"),), (1.0,), "predicted as nan s"),
    ],
)
def test_compare_refuses(
    predicted: tuple[float, ...], measured: tuple[float, ...], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        compare(timed("predicted", step=predicted), timed("measured", step=measured))


def test_compare_leaves_out_a_phase_that_took_no_time() -> None:
    found = compare(
        timed("predicted", step=[2.0, 2.0], tools=[0.1, 0.0], reward=[0.0, 1.0]),
        timed("measured", step=[2.0, 2.0], tools=[0.0, 0.0], reward=[0.0, 2.0]),
    )
    assert found.instant == ("tools",)
    assert found.phases.keys() == {"reward"}
    assert (found.phases["reward"].mean, found.phases["reward"].worst) == (0.75, 0.5)


def test_compare_reads_runs_and_lists(call: Call, tmp_path: Path) -> None:
    run = metrics(
        tmp_path / "run" / "metrics.jsonl",
        {0: (99.0, 1.0, 1.0), 1: (4.0, 3.0, 1.0), 2: (5.0, 4.0, 1.0)},
        # A resumed run repeats a step, and a crash tears the last line.
        json.dumps({"step": 0, "step_time": 2.0, "timing_s/rollout": 1.0, "timing_s/train": 1.0})
        + '\n{"step": 3',
    ).parent
    lists = tmp_path / "simulated.json"
    data = {"step_s": [2.0, 3.0, 5.0], "phases": {"rollout": [1.0, 3.0, 3.0]}, "mean_step_s": 3.3}
    lists.write_text(json.dumps({**data, "sim_wall_s": 0.1}))
    code, out, _ = call("compare", lists, run, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["accuracy_mean"] == pytest.approx((1 + 0.75 + 1) / 3)
    assert found["accuracy_worst"] == pytest.approx(0.75)
    assert found["phases"]["rollout"]["worst"] == pytest.approx(0.75)
    code, out, err = call("compare", lists, run)
    assert code == 0
    assert "91.7%" in out
    assert f"only {run / 'metrics.jsonl'} has train: not compared" in err
    assert call("compare", run, run / "metrics.jsonl")[1].count("100.0%") == 7


def test_compare_names_the_steps_that_one_lacks(tmp_path: Path) -> None:
    a = read_timed(metrics(tmp_path / "a.jsonl", {3: (1.0, 1.0, 1.0), 4: (1.0, 1.0, 1.0)}))
    b = read_timed(metrics(tmp_path / "b.jsonl", {4: (1.0, 1.0, 1.0), 7: (1.0, 1.0, 1.0)}))
    assert a == TimedSteps(
        source=a.source,
        steps=(3, 4),
        phases={"step": (1.0, 1.0), "rollout": (1.0, 1.0), "train": (1.0, 1.0)},
    )
    with pytest.raises(TraceError, match=r"a\.jsonl lacks steps 7 of .*b\.jsonl"):
        compare(a, b)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"step": 0, "step_s": 1}\n{"step": 1}\n', "no step in steps 1"),
        ("a.jsonl", '{"step": 0, "step_s": 1}\nnot\n{}\n', "line 2: not JSON"),
        ("a.jsonl", "[1]\n", "line 1: expected an object"),
        ("a.jsonl", '{"step": "one", "step_s": 1}\n', "line 1: step: expected a whole number"),
        ("a.jsonl", '{"step": 0, "reward": 1}\n', "no step_time or step_s"),
        ("a.json", '{"step_s": [1, 2], "train_s": [1]}', "train has 1 entries, step_s has 2"),
        ("a.json", '{"step_s": [1, null]}', "step: expected numbers only"),
        ("a.json", "[1, 2]", "expected an object with a list step_s"),
        ("a.json", '{"step_s": [1]', "not JSON"),
    ],
)
def test_compare_says_what_is_wrong_with_a_file(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_timed(path)
