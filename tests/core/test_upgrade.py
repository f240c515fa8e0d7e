"""What earlier versions wrote is read as if today's version had written it."""

from rollpacker.core.upgrade import VERSION, Upgrade, config_of_now

RULES = {"stream": True, "consolidate_below": 3, "updates": 1}


def test_settings_of_the_first_version_speak_of_engines() -> None:
    settings = {
        "seed": 3,
        "rules": RULES | {"replica": 2, "tail_workers": 1},
        "machine": {"node_size": 8, "worker_devices": 2, "replica_devices": 4},
    }
    upgraded = Upgrade().line({"meta": {"settings": settings, "state": {"a": 1}}})
    assert upgraded["meta"] == {
        "settings": {
            "seed": 3,
            "rules": RULES | {"layout": "colocated", "tail_engines": 1},
            "machine": {"node_size": 8, "engine_devices": 2, "replica_devices": 4},
        },
        "state": {"a": 1},
    }
    assert "replica" in settings["rules"], "the line itself stays"


def test_settings_without_devices_or_rules_that_came_later_are_read() -> None:
    meta = {"settings": {"rules": RULES, "machine": None}}
    upgraded = Upgrade().line({"meta": meta})["meta"]["settings"]
    assert upgraded == {"rules": RULES | {"layout": "colocated"}, "machine": None}
    assert Upgrade().line({"meta": {"short": True}}) == {"meta": {"short": True}}


def test_settings_of_this_version_stay() -> None:
    line = {"meta": {"settings": {"rules": RULES | {"layout": "separate"}}}, "version": VERSION}
    assert Upgrade().line(line) == line


def test_a_config_of_the_first_version_speaks_of_devices() -> None:
    old = {
        "seed": 3,
        "workers": {"count": 2, "per_gpu": 1, "threads": 1, "pin": False}
        | {"device": "cpu", "heartbeat_s": 5.0},
    }
    assert config_of_now(old) == {
        "seed": 3,
        "devices": {"per_node": 2, "per_gpu": 1, "threads": 1, "pin": False, "kind": "cpu"},
        "cluster": {"heartbeat_s": 5.0},
    }
    assert "workers" in old, "the tree itself stays"


def test_a_config_of_this_version_stays() -> None:
    new = {"devices": {"per_node": 2}, "grading": {"workers": 3}}
    assert config_of_now(new) == new
    assert config_of_now(new | {"workers": {"count": 7}}) == new, "today's keys count"


def test_what_no_version_wrote_stays() -> None:
    for strange in ({"workers": 2}, {"workers": {"cores": 2}}, {"workers": None}):
        assert config_of_now(strange) == strange
