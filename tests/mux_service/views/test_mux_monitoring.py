"""Alert rules and the board ask only for what a daemon says, and promtool takes them all."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from mux_fleet import Daemon, Link
from mux_promql import asked, values
from prometheus_client.parser import text_string_to_metric_families

FOLDER = Path(__file__).parents[3] / "examples" / "mux" / "monitoring"
RULES = yaml.safe_load((FOLDER / "rules.yaml").read_text())
BOARD = json.loads((FOLDER / "grafana.json").read_text())
PANELS: list[Any] = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
ALERTS: list[Any] = [rule for group in RULES["groups"] for rule in group["rules"]]
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")

SPEC = {"worst_rollout_s": 60.0, "worst_train_s": 60.0, "slo": 1.0, "iterations": 9}
STATES = {"queued", "idle", "waiting", "running", "moving", "failing", "ending", "ended"}
KNOWN = {
    "state": STATES | {"kept", "near", "behind", "missed"} | {"free", "held", "reserved", "failed"},
    "status": {"open", "cordoned", "draining", "drained", "set_aside", "down"},
    "outcome": {"done", "lost"},
    "phase": {"rollout", "train"},
}


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What a daemon says of two teams, a running job, one that waits and one that is over."""
    folder = tmp_path_factory.mktemp("monitoring")
    nodes = [{"name": "h20-[0-1]", "pool": "rollout"}, {"name": "h800-[0-1]", "pool": "train"}]
    teams = [{"name": "math", "rollout": 1, "train": 1}, {"name": "code", "rollout": 1}]
    (folder / "nodes.yaml").write_text(yaml.safe_dump({"nodes": nodes, "teams": teams}))
    daemon = Daemon(folder / "state", ttl=60.0, inventory=folder / "nodes.yaml")
    daemon.start()
    link = Link(daemon.port, daemon.token)
    for name, team in (("a", "math"), ("gone", "code"), ("b", "art"), ("c", "code")):
        job = SPEC | {"id": name, "team": team}
        assert link.once("POST", "/v1/jobs", job, f"submit-{name}")[0] == 201
        if name == "gone":
            link.once("POST", "/v1/jobs/gone/end", {}, "end")
    for phase in ("rollout", "train"):
        _, permit = link.once("POST", "/v1/jobs/a/permits", {"phase": phase}, f"ask-{phase}")
        path = f"/v1/permits/{permit['token']}/finish"
        assert link.once("POST", path, {"seconds": 30.0}, f"finish-{phase}")[0] == 200
    assert link.once("POST", "/v1/jobs/a/permits", {"phase": "rollout"}, "ask")[0] == 200
    link.once("POST", "/v1/nodes/h20-0/heartbeat", {}, "agent")
    link.once("POST", "/v1/nodes/h20-1/close", {"status": "cordoned"}, "close")
    yield link.once("GET", "/metrics")[1]
    daemon.stop()


@pytest.fixture(scope="module")
def samples(scraped: str) -> list[tuple[str, dict[str, str], float]]:
    families = text_string_to_metric_families(scraped)
    return [(each.name, each.labels, each.value) for one in families for each in one.samples]


@pytest.fixture(scope="module")
def labels(samples: list[tuple[str, dict[str, str], float]]) -> dict[str, set[str]]:
    """Labels of every series, with what Prometheus adds."""
    found: dict[str, set[str]] = {"up": set()}
    for name, its, _ in samples:
        found.setdefault(name, set()).update(its)
    return {name: its | {"job", "instance"} for name, its in found.items()}


def queries() -> dict[str, str]:
    """All of them, by where they are; what Grafana fills in is filled in."""
    found = {f"alert {rule['alert']}": rule["expr"] for rule in ALERTS}
    for panel in PANELS:
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "5m")
            found[f"panel {panel['title']} {target['refId']}"] = query
    return found


def test_every_query_asks_for_series_and_labels_that_there_are(
    labels: dict[str, set[str]],
) -> None:
    for where, query in queries().items():
        found = asked(query)
        assert found.series, where
        for name, matched in found.series:
            assert name in labels, f"{where}: {name}"
            assert matched <= labels[name], f"{where}: {name}"
        of_all = set().union(*(labels[name] for name, _ in found.series))
        assert found.grouped <= of_all, where
        for _, label, text in values(query):
            assert label not in KNOWN or text in KNOWN[label], f"{where}: {label}={text}"


def test_texts_and_legends_name_labels_that_there_are(labels: dict[str, set[str]]) -> None:
    for rule in ALERTS:
        of_all = set().union(*(labels[name] for name, _ in asked(rule["expr"]).series))
        text = " ".join(rule["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= of_all, rule["alert"]
        assert rule["labels"]["severity"] in ("page", "warning")
    for panel in PANELS:
        for target in panel["targets"]:
            of_all = set().union(*(labels[name] for name, _ in asked(target["expr"]).series))
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= of_all, panel["title"]


def test_there_is_an_alert_for_all_that_may_go_wrong() -> None:
    wanted = "Down StoreFailing PoisonedEvents LeasesLost JobNearItsSlo JobMissedItsSlo "
    wanted += "QueueDoesNotMove JobWaitsForADay NodeDown NodeSilent NodeSetAside"
    assert [rule["alert"] for rule in ALERTS] == [f"Rollmux{name}" for name in wanted.split()]
    tested = (FOLDER / "rules_test.yaml").read_text()
    assert [rule["alert"] for rule in ALERTS if rule["alert"] not in tested] == []


def test_the_board_is_one_that_grafana_can_show(labels: dict[str, set[str]]) -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: dict[tuple[int, int], str] = {}
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
    variables = {each["name"]: each for each in BOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    for name in ("team", "pool"):
        pattern = r"label_values\((\w+), (\w+)\)"
        series, label = re.fullmatch(pattern, variables[name]["definition"]).groups()  # type: ignore[union-attr]
        assert label in labels[series]
    used = set(re.findall(r"\$(\w+)", json.dumps(PANELS))) - {"__rate_interval"}
    assert used <= set(variables)
    for panel in PANELS:
        refs = [target["refId"] for target in panel["targets"]]
        assert refs, panel["title"]
        assert len(set(refs)) == len(refs)
        assert {each["datasource"]["uid"] for each in panel["targets"]} == {"${datasource}"}


def test_the_numbers_are_those_of_the_cluster(
    samples: list[tuple[str, dict[str, str], float]],
) -> None:
    found = {(name, *sorted(its.items())): value for name, its, value in samples}

    def number(series: str, **its: str) -> float | None:
        return found.get((f"rollmux_{series}", *sorted(its.items())))

    assert number("jobs", state="running", team="math") == 1
    assert number("jobs", state="ended", team="code") == 1
    assert number("jobs", state="queued", team="code") == 1
    assert number("queue_length", team="code") == 1
    assert number("queue_length", team="math") == 0
    assert number("queue_wait_seconds", team="math") == 0
    assert number("job_slowdown_limit_ratio", job_id="a", team="math") == 1
    assert number("job_iterations_done", job_id="b", team="other") == 0
    assert number("job_iterations_done", job_id="gone", team="code") is None
    assert number("phases_total", phase="rollout", outcome="done") == 1
    assert number("phases_total", phase="train", outcome="lost") == 0
    assert number("team_nodes_used", team="other", pool="rollout") == 1
    assert number("team_nodes_guaranteed", team="code", pool="train") == 0
    assert number("nodes", pool="rollout", state="held", status="cordoned") == 1
    assert number("node_status", node="h20-1", pool="rollout", status="cordoned") == 1
    assert number("node_up", node="h20-1", pool="rollout") == 1
    assert number("node_memory_used_bytes", node="h20-0", pool="rollout") == 150e9
    assert number("node_memory_bytes", node="h20-0", pool="rollout") == 1536e9
    assert number("node_report_age_seconds", node="h20-1", pool="rollout") is None
    assert number("idle_ratio", pool="rollout") == 0.5
    assert number("idle_ratio", pool="train") == 1.0
    assert number("store_writable") == 1
    assert number("requests_total", method="POST", route="/v1/jobs", status="201") == 4
    assert (number("commit_seconds_count") or 0) > 0
    assert (number("cost_dollars_per_hour") or 0) > 0
    assert {its["job_id"] for _, its, _ in samples if "job_id" in its} == {"a", "b", "c"}
    # Prometheus has these two of its own, and would rename ours.
    assert [name for name, its, _ in samples if {"job", "instance"} & its.keys()] == []


def promtool(*arguments: object, given: str = "") -> None:
    command = ["promtool", *map(str, arguments)]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_takes_the_rules_and_their_tests() -> None:
    promtool("check", "rules", FOLDER / "rules.yaml")
    promtool("test", "rules", FOLDER / "rules_test.yaml")


@needs_promtool
def test_promtool_takes_the_metrics_and_the_configuration(scraped: str, tmp_path: Path) -> None:
    promtool("check", "metrics", given=scraped)
    for name in ("prometheus.yaml", "rules.yaml"):
        shutil.copy(FOLDER / name, tmp_path)
    (tmp_path / "token").write_text("a-token-of-the-daemon\n")
    promtool("check", "config", tmp_path / "prometheus.yaml")


@needs_promtool
def test_promtool_takes_the_queries_of_the_board(tmp_path: Path) -> None:
    rules = [
        {"record": f"board:{number}", "expr": query}
        for number, (where, query) in enumerate(queries().items())
        if where.startswith("panel")
    ]
    file = tmp_path / "board.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    promtool("check", "rules", file)
