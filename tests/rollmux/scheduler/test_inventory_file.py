"""Inventory files: what they may say, and what is said when they are wrong."""

from pathlib import Path

import pytest

from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.scheduler.inventory_file import SCARCE_MARGIN, expand, parse, read

GOOD = """
nodes:
  - {name: "r[08-11]", pool: rollout, memory_gb: 512, rack: a, labels: {nvlink: yes}}
  - {name: t0, pool: train}
teams:
  - {name: math, rollout: 2}
"""


def test_names_hold_ranges(tmp_path: Path) -> None:
    file = tmp_path / "nodes.yaml"
    file.write_text(GOOD, encoding="utf-8")
    found = read(file)
    assert [machine.name for machine in found.machines] == ["r08", "r09", "r10", "r11", "t0"]
    assert found.machines[0].labels == {"nvlink": "True"}
    how = found.settings(Settings())
    assert (how.nodes, how.margin, how.memory_cap_gb) == ("named", SCARCE_MARGIN, 1536.0)
    assert how.teams[0].guaranteed == (2, 0.0)
    assert expand("a[0-1]b[3-4]") == ["a0b3", "a0b4", "a1b3", "a1b4"]


def test_a_cloud_has_prices_and_limits() -> None:
    found = parse({"cloud": {"rollout": {"price": 2.5, "limit": 8}, "train": {"price": 4}}})
    how = found.settings(Settings())
    assert (how.prices.rollout, how.prices.train, how.limit) == (2.5, 4.0, (8, None))
    assert how.margin == SCARCE_MARGIN
    free = parse({"cloud": {"rollout": {"price": 2.5}}}).settings(Settings())
    assert (free.nodes, free.margin, free.limit) == ("cloud", 0.0, (None, None))


def test_all_nodes_may_join_by_their_agents() -> None:
    made = parse({"nodes": [], "teams": [{"name": "x", "rollout": 2}]})
    assert made.machines == ()
    assert made.settings(Settings()).nodes == "named"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "the file: expected keys and values"),
        ({"node": []}, "unknown key 'node'; known: nodes, teams, cloud"),
        ({}, "give either nodes"),
        ({"nodes": {}}, "nodes: expected a list"),
        ({"nodes": [{"name": "a"}]}, r"nodes\[0\]: .*pool"),
        ({"nodes": [{"name": "a", "pool": "gpu"}]}, "node a: pool is rollout or train, got 'gpu'"),
        (
            {"nodes": [{"name": "a", "pool": "rollout", "gpus": 8}]},
            r"nodes\[0\]: unknown key 'gpus'",
        ),
        ({"nodes": [{"name": "a", "pool": "rollout"}]}, "there is no train node"),
        ({"nodes": [{"name": "a[3-1]", "pool": "rollout"}]}, "the range ends before it begins"),
        (
            {"nodes": [{"name": n, "pool": p} for n, p in (("a", "rollout"), ("a", "train"))]},
            "nodes: a is listed twice",
        ),
        (
            {
                "nodes": [{"name": p, "pool": p} for p in ("rollout", "train")],
                "teams": [{"name": "x", "rollout": 2}],
            },
            "teams: 2 rollout nodes are guaranteed, but there are 1",
        ),
        ({"cloud": {"gpu": {}}}, "cloud: unknown key 'gpu'"),
        ({"cloud": {"train": {"cost": 1}}}, "cloud.train: unknown key 'cost'"),
        ({"cloud": {"train": {"price": -1}}}, "cloud.train.price: expected a positive number"),
    ],
)
def test_what_is_wrong_is_said(data: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(data)


def test_no_yaml_is_said_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "nodes.yaml"
    file.write_text("nodes: [", encoding="utf-8")
    with pytest.raises(ValueError, match=r"nodes\.yaml: .*"):
        read(file)
    with pytest.raises(ValueError, match="No such file"):
        read(tmp_path / "none.yaml")
