"""``rollpacker trace import|export|validate``."""

import json
from pathlib import Path

from trace_lines import dump, load, packed, polytrace_folder
from typer.testing import CliRunner, Result

from rollpacker.cli.trace.app import trace_app


def call(*words: object) -> Result:
    return CliRunner().invoke(trace_app, [str(word) for word in words])


def test_import_then_export_gives_the_files_back(tmp_path: Path) -> None:
    source = polytrace_folder(tmp_path / "math")
    trace, out = tmp_path / "sub" / "t.parquet", tmp_path / "out"
    done = call("import", source, "--out", trace, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["file"] == str(trace)
    assert told["tasks"]["math"]["responses"] == 21
    assert told["tasks"]["math"]["prompts"] == 7
    assert told["tasks"]["math"]["steps"] == 3
    done = call("export", trace, "--to", "polytrace", "--out", out, "--json")
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["files"]) == 5
    assert load(out) == load(source)


def test_import_shows_a_table_and_notes(tmp_path: Path) -> None:
    line = packed(output=[900] * 3)
    source = dump(tmp_path / "code" / "packed_lengths_step_0.jsonl", line).parent
    done = call("import", source, "--out", tmp_path / "t.parquet")
    assert done.exit_code == 0, done.output
    assert "code" in done.stdout
    assert "900" in done.stdout
    assert "note: code: the cap is not in the trace" in done.stderr


def test_validate_lists_lines_and_fails(tmp_path: Path) -> None:
    source = polytrace_folder(tmp_path / "math")
    assert call("validate", source).exit_code == 0
    path = dump(source / "packed_lengths_step_2.jsonl", packed(2), packed(2, input=-1))
    done = call("validate", source)
    assert done.exit_code == 1
    assert f"{path}, line 2: input: expected 0 to" in done.stdout
    done = call("validate", source, "--json")
    assert done.exit_code == 1
    (problem,) = json.loads(done.stdout)["problems"]
    assert (problem["file"], problem["line"]) == (str(path), 2)
