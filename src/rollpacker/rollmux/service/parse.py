"""From an HTTP request to a checked request: body, key, fields."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, NoReturn, cast

from rollpacker.rollmux.service.commands import Request
from rollpacker.rollmux.service.refused import Refused

_KEY = re.compile(r"[A-Za-z0-9._:-]{1,128}")
MAX_WAIT_S = 60.0
DEFAULT_WAIT_S = 20.0


def post(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Request:
    """A POST. Raises ``Refused`` where key or body are not usable."""
    key = headers.get("idempotency-key", "")
    if not _KEY.fullmatch(key):
        raise Refused(
            400, "Idempotency-Key: this header is needed, 1 to 128 of A-Z a-z 0-9 . _ : -"
        )
    data = _object(body)
    asked = {name: value for name, value in data.items() if name != "wait_s"}
    text = f"{method} {path} {json.dumps(asked, sort_keys=True)}"
    return Request(key, blake2b(text.encode(), digest_size=16).hexdigest(), data)


def only(body: Mapping[str, Any], *names: str) -> None:
    """Raises ``Refused`` on a field that is not among the names."""
    for name in body:
        if name not in names:
            known = ", ".join(names) or "none"
            raise Refused(400, f"{name[:64]!a}: unknown field; known: {known}")


def phase(body: Mapping[str, Any]) -> str:
    """The phase that is asked for."""
    value = body.get("phase")
    if value not in ("rollout", "train"):
        raise Refused(400, "phase: must be 'rollout' or 'train'")
    return cast(str, value)


def wait_s(body: Mapping[str, Any]) -> float:
    """Seconds that a request may wait for its answer."""
    value = body.get("wait_s", DEFAULT_WAIT_S)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refused(400, "wait_s: a number of seconds is needed")
    if not 0 <= value <= MAX_WAIT_S:
        raise Refused(400, f"wait_s: must be 0 to {MAX_WAIT_S:g} seconds")
    return float(value)


def _object(body: bytes) -> dict[str, Any]:
    if not body:
        return {}
    try:
        data = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"body: no JSON: {str(error)[:100]}") from error
    if not isinstance(data, dict):
        raise Refused(400, "body: a JSON object is needed")
    return cast(dict[str, Any], data)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
