"""Bodies of any kind on every route: no 500, no wait, and no job but the sender's is touched."""

from __future__ import annotations

import http.client
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mux_strangers import Place

from fuzzing import amiss, torn
from rollpacker.rollmux.service.http.routes import ROUTES

JOB = {
    "id": "theirs", "worst_rollout_s": 60.0, "worst_train_s": 60.0, "slo": 2.0, "iterations": 3,
    "rollout_nodes": 1, "train_nodes": 1, "team": "code", "owner": "bob", "priority": 1,
    "rollout_labels": {"a": "b"}, "too_large": "wait", "expected_iterations": 4,
    "program": {"command": ["true", "x"], "environment": {"A": "1"}, "restarts": 1, "stop_s": 5.0},
}  # fmt: skip
NODE = {"name": "r7", "pool": "rollout", "memory_gb": 100.0, "devices": 8, "labels": {"x": "y"}}
SEEN = {"job": "mine", "number": 1, "code": None, "stopped": False}
VALID: dict[str, Any] = {
    "POST /v1/jobs": JOB,
    "POST /v1/jobs/{job}/permits": {"phase": "rollout", "wait_s": 0.0},
    "POST /v1/jobs/{job}/tail": {"token": 1},
    "POST /v1/jobs/{job}/moved": {"move": 1},
    "POST /v1/jobs/{job}/gate": {"host": "h", "port": 9, "key": "ab" * 80, "names": ["n"]},
    "POST /v1/jobs/{job}/attempts/{number}/log": {"at": 0, "data": "aGk="},
    "POST /v1/permits/{token}/finish": {"seconds": 1.0},
    "POST /v1/nodes": NODE,
    "POST /v1/nodes/{node}/heartbeat": {"attempts": [SEEN]},
    "POST /v1/nodes/{node}/failed": {"reason": "fire"},
    "POST /v1/nodes/{node}/close": {"status": "cordoned", "reason": "fire"},
    "POST /v1/drain": {"draining": False},
}
POSTS = [name for name in ROUTES if name.startswith("POST")]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.close()


class Sender:
    """Of bodies on one connection for each token."""

    def __init__(self, place: Place, seed: int) -> None:
        self.place, self.rng = place, random.Random(seed)
        self.found = Counter[int]()

    def send(self, who: str) -> None:
        """One request to any route; it is answered within the socket's patience."""
        name = self.rng.choice((*POSTS, *["POST /v1/jobs"] * 5))
        data = self._body(name)
        template = name.removeprefix("POST ")
        ids = {"job": self._one("mine", "theirs", "none"), "number": self._one(1, 2)}
        ids |= {
            "token": self._one(self.place.permit, 10**17),
            "node": self._one(self.place.node, "t1", "x"),
        }
        status, said = self._ask(who, template.format(**ids, part=""), data)
        assert status not in (500, 503), (name, data, said)
        assert status < 500
        self.found[status] += 1

    def _one(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def _body(self, name: str) -> bytes:
        valid = VALID.get(name, {})
        if name == "POST /v1/jobs":
            valid = valid | {"id": f"theirs-{self.rng.randrange(10**6)}"}
        value = amiss(valid, self.rng) if self.rng.random() < 0.7 else valid
        how = self.rng.random()
        if how < 0.1:
            value = self.rng.choice((*VALID.values(), [], 1, None, "x", True))
        if name.endswith("/permits") and isinstance(value, dict):
            value = {"wait_s": 0.0, **value}  # nobody waits here
        text = json.dumps(value, default=lambda each: each.decode("latin-1"))
        data = text.encode("utf-8", "surrogatepass")
        return torn(data, self.rng) if how > 0.85 else data

    def _ask(self, who: str, path: str, data: bytes) -> tuple[int, bytes]:
        link = self.place.links[who]
        connection = http.client.HTTPConnection("127.0.0.1", link._port, timeout=20)
        key = (
            f"fuzz-{self.rng.randrange(1000)}"
            if self.rng.random() < 0.1
            else f"f{self.rng.random()}"
        )
        try:
            connection.request("POST", path, data, {**link._headers, "Idempotency-Key": key})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def fuzz(place: Place, people: tuple[str, ...], count: int, seed: int) -> Counter[int]:
    sender = Sender(place, seed)
    for _ in range(count):
        sender.send(sender.rng.choice(people))
    print(f"\nseed {seed}: {count} bodies of {', '.join(people)}: {dict(sender.found)}")
    return sender.found


def strangers(place: Place, count: int, seed: int) -> None:
    """Another team, and those who may only look."""
    before = place.job()
    found = fuzz(place, ("code", "code", "code", "read", "nobody"), count, seed)
    assert min(found[status] for status in (201, 400, 401, 403)) > 3
    assert place.job() == before
    status, told = place.ask("math", "POST", f"/v1/permits/{place.permit}/heartbeat", {})
    assert (status, told["release_tail"]) == (200, False)
    status, told = place.ask("node", "POST", f"/v1/nodes/{place.node}/heartbeat", {"attempts": []})
    (wanted,) = [each for each in told["attempts"] if each["job"] == "mine"]
    assert (status, wanted["stop"]) == (200, False)
    for path in ("/v1/status", "/v1/jobs", "/v1/events", "/v1/timeline", "/metrics"):
        assert place.ask("read", "GET", path)[0] == 200


def test_bodies_of_others_touch_no_job(place: Place) -> None:
    strangers(place, 800, seed=34)


def test_bodies_of_those_who_may_break_nothing(place: Place) -> None:
    fuzz(place, ("math", "node", "operate"), 800, seed=35)
    assert place.ask("operate", "GET", "/v1/status")[0] == 200


@pytest.mark.slow
def test_many_bodies(place: Place) -> None:
    seed = random.randrange(2**32)
    strangers(place, 3000, seed)
    fuzz(place, ("math", "node", "operate"), 2000, seed + 1)
    assert place.ask("operate", "GET", "/v1/status")[0] == 200
