"""What earlier versions wrote is read as if today's version had written it."""

from rollpacker.core.upgrade import VERSION, Upgrade

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
