"""Writes ``docs/mux_api.md``: the daemon's HTTP API, from its own description (OpenAPI), with the
table of roles and routes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollpacker.rollmux.service.api.roles import ROLES
from rollpacker.rollmux.service.http.routes import ROUTES, described

PAGE = Path(__file__).parent / "mux_api.md"
Schema = Mapping[str, Any]
HEAD = """# The daemon's HTTP API (v1)

Start with [jobs and client](mux_client.md), or [operate a cluster](mux_operate.md). Programs can
read `GET /v1/openapi.json`.

Every path except `/`, `/favicon.ico`, `/assets/*` and `/v1/health` needs `Authorization: Bearer
TOKEN` ([roles](#roles-and-routes)). Bodies and answers are JSON objects. An unknown field of a body
is an error. Every POST needs an `Idempotency-Key` header (1 to 128 characters of `A-Za-z0-9._:-`).
The daemon runs a request with the same key once, and repeats its answer, which is on disk by then.
Times are seconds.

*This page is generated from the code by `docs/gen_mux_api.py`.*
"""
_ROLES = """
A route that this table lacks is not served. ✓: may. *own*: a token of a team (`mux token add
--team`) may do this for jobs of its team. The role `operate` may do everything, and `nobody` has no
token.
"""
_SMALL = 4
"""Fields of an object that needs no section of its own."""
_UNKNOWN = re.compile(r"^`unknown`: no such (job|node|permit)(\. )?")
_BARE = str.maketrans("", "", "()")
_NO_LIMIT = 1e12
_TITLES = {
    "jobs": "Jobs",
    "permits": "Permits",
    "nodes": "Nodes",
    "tokens": "Tokens",
    "cluster": "The cluster",
}


def one_line(text: str) -> str:
    """Without line breaks, in Markdown."""
    return " ".join(text.split()).replace("``", "`")


def render() -> str:
    """The page."""
    found = described()
    schemas = found["components"]["schemas"]
    routes = [
        (path, method, route)
        for path, methods in found["paths"].items()
        for method, route in methods.items()
    ]
    lines = [HEAD]
    for tag, title in _TITLES.items():
        lines += [f"## {title}", ""]
        for path, method, route in routes:
            if route["tags"] == [tag]:
                lines += _route(path, method, route, schemas)
    lines += [*_roles(), *_common(routes[0][2])]
    lines += ["## Objects", ""]
    text = "\n".join(lines)
    for name, schema in sorted(schemas.items()):
        if not _small(schema) or any(_names(other, name) for other in schemas.values()):
            text += f"\n### {name} object\n\n{one_line(schema.get('description', ''))}\n\n"
            text += "\n".join(_table(schema))
    return text.rstrip() + "\n"


def _small(schema: Schema) -> bool:
    """Whether it is told where it is used."""
    return len(schema.get("properties", ())) <= _SMALL


def _names(schema: Any, name: str) -> bool:
    """Whether a schema is made of another one."""
    return f'/{name}"' in json.dumps(schema)


def _roles() -> Iterator[str]:
    """Who may ask for what."""
    yield from ("## Roles and routes", _ROLES)
    yield from ("| route | nobody | read | submit | node |", "|---|---|---|---|---|")
    for name, access in ROUTES.items():
        cells = [f"`{name}`", _may(access.roles is None)]
        for role in ROLES[:-1]:
            may = access.roles is None or role in access.roles
            cells.append("*own*" if may and role == "submit" and access.owner else _may(may))
        yield f"| {' | '.join(cells)} |"
    yield ""


def _may(may: bool) -> str:
    return "✓" if may else ""


def _route(path: str, method: str, route: Schema, schemas: Schema) -> Iterator[str]:
    yield from (f"### `{method.upper()} {path}`", "", one_line(route["description"]), "")
    asked = [each for each in route.get("parameters", []) if each["in"] == "query"]
    if asked:
        properties = {each["name"]: each["schema"] for each in asked}
        yield f"- Query: {_fields({'properties': properties})}"
    body = route.get("requestBody", {}).get("content", {}).get("application/json", {})
    told = _object(body.get("schema", {}), schemas) if body else ""
    if told:
        yield f"- Body: {told}"
    earlier: dict[str, str] = {}
    for status, answer in route["responses"].items():
        if status != "default" and (text := _answer(status, answer, schemas, earlier)):
            yield f"- {status}: {text}"
    yield ""


def _answer(status: str, answer: Schema, schemas: Schema, earlier: dict[str, str]) -> str:
    """``earlier``: the first status of the route with an object, by what is told of that."""
    content = answer.get("content", {})
    schema = content.get("application/json", {}).get("schema")
    text = one_line(answer["description"])
    if not schema:
        return next(iter(content), "") or text.replace("done", "JSON lines")
    if schema.get("$ref", "").endswith("/Error"):
        return _UNKNOWN.sub("", text)
    told = _object(schema, schemas) or "`{}`"
    first = earlier.setdefault(told, status)
    told = told if first == status else f"as {first}"
    return told if text == "done" else f"{told}, {text}"


def _object(schema: Schema, schemas: Schema) -> str:
    """Its fields where they are few, else where they are."""
    if "anyOf" in schema:
        return " or ".join(_object(each, schemas) for each in schema["anyOf"])
    found = schemas[schema["$ref"].rsplit("/", 1)[1]]
    return _fields(found) if _small(found) else _type(schema)


def _fields(schema: Schema) -> str:
    """In one line."""
    told: list[str] = []
    for name, field in schema.get("properties", {}).items():
        meaning = _meaning(field).removesuffix(".")
        default = f", default {_default(field)}" if _default(field) else ""
        kind = f"{_type(field)}{_limits(field).translate(_BARE)}{default}"
        told.append(f"`{name}` ({kind}{f': {meaning[:1].lower()}{meaning[1:]}' * bool(meaning)})")
    return ", ".join(told)


def _meaning(field: Schema) -> str:
    return one_line(field.get("description", "")).replace("None", "null")


def _common(route: Schema) -> list[str]:
    text = one_line(route["responses"]["default"]["description"])
    lines = [
        "## Errors",
        "",
        "`error` says in one line what is wrong and which field, `code` the reason where there are "
        "several. Some errors have more fields. A job, node or permit that nobody knows is a 404 "
        "`unknown`, and any request may be answered by:",
        "",
    ]
    return [*lines, *(f"- {each}" for each in text.split(". ")), ""]


def _table(schema: Schema) -> list[str]:
    if not any(map(_meaning, schema["properties"].values())):
        return [_fields(schema), ""]
    required = schema.get("required", [])
    chosen = any("default" in field for field in schema["properties"].values())
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name, field in schema["properties"].items():
        default = f" {'required' if name in required else _default(field) or 'none'} |"
        meaning = _meaning(field).replace("|", "\\|")
        kind = f"{_type(field)}{_limits(field)} |{default if chosen else ''}"
        lines.append(f"| `{name}` | {kind} {meaning} |")
    if not chosen:
        lines[:2] = ["| field | type | meaning |", "|---|---|---|"]
    return [*lines, ""]


def _default(field: Schema) -> str:
    if "default" not in field:
        return "`{}`" if field.get("type") == "object" else ""
    value = field["default"]
    if value in (None, "", []):
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _type(field: Schema) -> str:
    if "$ref" in field:
        name = field["$ref"].rsplit("/", 1)[1]
        return f"[`{name}`](#{name.lower()}-object)"
    if "anyOf" in field:
        return " or ".join(_type(each) for each in field["anyOf"])
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    return _plain(field)


def _plain(field: Schema) -> str:
    match field.get("type"):
        case "array" if "prefixItems" in field:
            return "pair of " + _type(field["prefixItems"][0])
        case "array":
            return "list of " + _type(field["items"])
        case "object" if isinstance(field.get("additionalProperties"), Mapping):
            return "object of " + _type(field["additionalProperties"])
        case "string":
            return "text"
        case kind:
            return str(kind)


def _limits(field: Schema) -> str:
    words = {
        "minimum": "≥ {}",
        "exclusiveMinimum": "> {}",
        "maximum": "≤ {}",
        "exclusiveMaximum": "< {}",
        "maxLength": "at most {} characters",
    }
    found = [
        text.format(f"{field[key]:g}")
        for key, text in words.items()
        if key in field and abs(field[key]) < _NO_LIMIT
    ]
    return f" ({', '.join(found)})" if found else ""


def main() -> None:
    """Write the page; with ``--check`` only compare, and exit 1 when it is out of date."""
    text = render()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE.name} is out of date: run make docs")


if __name__ == "__main__":
    main()
