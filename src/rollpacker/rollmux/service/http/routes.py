"""The table of all routes. Nothing else is served. Names and numbers in paths have one spelling."""

from __future__ import annotations

import asyncio
import base64
import binascii
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, wraps
from importlib.resources import files
from pathlib import PurePath
from typing import Any, Final, Literal, get_type_hints, is_typeddict

import msgspec

from rollpacker import __version__
from rollpacker.core.codec import plain
from rollpacker.rollmux.model.inventory import NAME
from rollpacker.rollmux.service.api import answers as to
from rollpacker.rollmux.service.api import bodies
from rollpacker.rollmux.service.api.bodies import Empty, Post
from rollpacker.rollmux.service.api.roles import Refused, Role
from rollpacker.rollmux.service.commands import commands
from rollpacker.rollmux.service.commands.writer import Answer, Outcome, Writer
from rollpacker.rollmux.service.http.logs import MOST, Logs
from rollpacker.rollmux.service.http.tokens import Tokens
from rollpacker.rollmux.service.views import history, views
from rollpacker.rollmux.service.views.metrics import Metrics

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")  # the only spelling of a 64-bit number
IDENTIFIERS: Final[Mapping[str, tuple[re.Pattern[str], Callable[[str], str | int]]]] = {
    "job": (NAME, str),
    "node": (NAME, str),
    "token": (_NUMBER, int),
    "number": (_NUMBER, int),
    "part": (re.compile(r"[a-z_]{1,32}\.[a-z]{2,4}"), str),
}
"""Pattern and parser of each identifier in paths."""


@dataclass(frozen=True, slots=True)
class DaemonParts:
    """The parts of the daemon that routes use.

    ``gates`` has the attempt and gate of each running job, in memory only, since drivers repeat it.
    """

    writer: Writer
    metrics: Metrics
    logs: Logs
    tokens: Tokens
    gates: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Asked:
    """An admitted request: identifiers of its path, and the body of a POST or query of a GET."""

    path: tuple[Any, ...]
    body: Any
    post: Post


Act = Callable[[DaemonParts, Asked], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class Route:
    """A row of the table.

    Args:
        act: handler. Its docstring is the route's description.
        roles: roles with access, besides ``operate`` (None for everybody, without a token).
        owner: the part of the path, or ``body``, that names the job. Its team must be that of the
            token. Empty if the route concerns no single job, or only reads.
        body: type of a POST's body or a GET's query.
        answer: one type, several, or a description (None if the route is not part of the API).
        errors: answers with other statuses. Those with a type are not errors.
        audited: whether the audit log has it. Frequent requests are in the event log only.
    """

    act: Act
    roles: tuple[Role, ...] | None
    owner: Literal["", "job", "token", "body"]
    body: type[Any]
    answer: Any
    errors: Mapping[int, str | tuple[str, type[Any] | None]] = field(default_factory=dict)
    audited: bool = False
    status: int = 200


def _once(act: Callable[..., Outcome], *, beat: bool = False, waits: bool = False) -> Act:
    """Carry out a command once and answer after the commit. If it ``waits``, wait as requested."""

    @wraps(act)
    async def handle(daemon: DaemonParts, asked: Asked) -> Answer:
        # A lease counts from the request, so a late answer would be useless.
        wait_s = min(asked.body.wait_s, daemon.writer.core.ttl / 3) if waits else None
        body = () if isinstance(asked.body, Empty) else (asked.body,)
        command = lambda core: act(core, asked.post, *asked.path, *body)  # noqa: E731
        answer = await daemon.writer.call(
            lambda core: commands.once(core, asked.post, lambda: command(core)), wait_s, beat=beat
        )
        return answer or Answer(204, None)

    return handle


def _look(view: Callable[..., Any]) -> Act:

    @wraps(view)
    async def handle(daemon: DaemonParts, asked: Asked) -> Answer:
        query = plain(asked.body)
        return Answer(200, await daemon.writer.read(lambda core: view(core, *asked.path, **query)))

    return handle


async def _submit(daemon: DaemonParts, asked: Asked) -> Answer:
    """Submit a job. If it does not fit yet, it waits for nodes."""
    # Check the team first: a known key must not bypass it.
    commands.own_team(asked.post, asked.body.team)
    return await _once(commands.submit)(daemon, asked)


async def _heartbeat(daemon: DaemonParts, asked: Asked) -> Answer:
    """Extend a lease to its full time. Send it about every third of that.

    Use a fresh key each time, since a repeated one extends nothing.
    """
    beat = lambda core: commands.heartbeat(core, asked.post, *asked.path)  # noqa: E731
    return await daemon.writer.call(beat, beat=True)


async def _open_gate(daemon: DaemonParts, asked: Asked) -> Answer:
    """Set the address of the driver of a job's running attempt, for its other processes."""
    (job,) = asked.path
    attempt = await daemon.writer.read(lambda core: commands.running(core, job))
    daemon.gates[job] = attempt.number, plain(asked.body)
    return Answer(200, {})


async def _gate(daemon: DaemonParts, asked: Asked) -> Answer:
    """The address of an attempt's driver, for processes that agents have started."""
    (job,) = asked.path
    number, found = daemon.gates.get(job, (0, {}))
    if number != asked.body.attempt:
        await daemon.writer.read(lambda core: commands.running(core, job))
        raise Refused(404, f"job {job}: the driver has no gate yet", code="no_gate")
    return Answer(200, found)


async def _printed(daemon: DaemonParts, asked: Asked) -> Answer:
    """A program's output, from its agent. Bytes that the daemon has are not added again."""
    job, number = asked.path
    await daemon.writer.read(lambda core: commands.attempt(core, job, number))
    try:
        data = base64.b64decode(asked.body.data, validate=True)
    except binascii.Error as error:
        raise Refused(400, f"data: not base64: {error}") from error
    have = await asyncio.to_thread(daemon.logs.add, job, number, asked.body.at, data)
    return Answer(200, to.PrintedAnswer(have=have, full=have >= MOST))


async def _log(daemon: DaemonParts, asked: Asked) -> Answer:
    """A piece of a program's output: of its last start, or of ``attempt``.

    It begins at byte ``at``. A negative one counts from the end.
    """
    (job,), wanted = asked.path, asked.body
    found = await daemon.writer.read(lambda core: commands.attempt(core, job, wanted.attempt))
    at, data, have = await asyncio.to_thread(daemon.logs.read, job, found.number, wanted.at)
    told = to.Log(
        attempt=found.number,
        node=found.node,
        code=found.code,
        at=at,
        data=base64.b64encode(data).decode(),
        over=found.ended is not None and at + len(data) >= have,
    )
    return Answer(200, told)


async def _tokens(daemon: DaemonParts, _: Asked) -> Answer:
    """All tokens except the operator's."""
    fields = to.TokenView.__annotations__
    told = [{name: getattr(each, name) for name in fields} for each in daemon.tokens.listed]
    return Answer(200, {"tokens": told})


async def _new_token(daemon: DaemonParts, asked: Asked) -> Answer:
    """Make a token, valid at once. A repeat with the same key is refused."""
    name, team = asked.body.name, asked.body.team
    teams = await daemon.writer.read(lambda core: [team.name for team in core.settings.teams])
    if team and teams and team not in teams:
        raise Refused(400, f"team: there is no team {team[:64]!r}; known teams: {', '.join(teams)}")
    try:
        text = await asyncio.to_thread(daemon.tokens.add, name, asked.body.role, team)
    except ValueError as error:
        raise Refused(400, str(error)) from error
    return Answer(201, to.TokenMade(name=name, token=text))


async def _revoke_token(daemon: DaemonParts, asked: Asked) -> Answer:
    """Revoke a token at once."""
    try:
        await asyncio.to_thread(daemon.tokens.revoke, asked.body.name)
    except ValueError as error:
        raise Refused(404, str(error), code="unknown") from error
    return Answer(200, {})


async def _health(daemon: DaemonParts, _: Asked) -> Answer:
    """Whether the daemon can work. Needs no token."""
    if daemon.writer.alive:
        return Answer(200, to.Health(status=daemon.writer.ailing or "ok"))
    return Answer(503, to.Health(status="the store cannot be written"))


async def _jobs(daemon: DaemonParts, _: Asked) -> Answer:
    """All jobs, including ended ones."""
    return Answer(200, await views.all_jobs(daemon.writer.read))


async def _metrics(daemon: DaemonParts, _: Asked) -> Answer:
    """Metrics for Prometheus, also at ``/metrics``."""
    return Answer(200, await daemon.metrics.text(daemon.writer), "text/plain; version=0.0.4")


async def _journal(daemon: DaemonParts, asked: Asked) -> Answer:
    """Entries after a number as JSON lines, for replay."""
    lines = history.journal(daemon.writer.core.store.reader(), asked.body.after)
    return Answer(200, lines, "application/jsonl")


async def _events(daemon: DaemonParts, _: Asked) -> Answer:
    """The event log as JSON lines."""
    core = daemon.writer.core
    return Answer(200, history.event_log(core.store.reader(), core.settings), "application/jsonl")


async def _openapi(_: DaemonParts, __: Asked) -> Answer:
    return Answer(200, described())


@cache
def _assets() -> Mapping[str, bytes]:
    """The dashboard's files, all from the package."""
    folder = files("rollpacker.rollmux.service").joinpath("assets")
    parts = [*folder.iterdir(), *folder.joinpath("views").iterdir()]
    return {part.name: part.read_bytes() for part in parts if part.is_file()}


async def _asset(_: DaemonParts, asked: Asked) -> Answer:
    (part,) = asked.path or ("index.html",)
    if part not in _assets():
        raise Refused(404, "the dashboard has no such file")
    return Answer(200, _assets()[part], f"{_TYPES[PurePath(part).suffix]}; charset=utf-8")


async def _icon(_: DaemonParts, __: Asked) -> Answer:
    return Answer(204, None)


_LOOK: Final[tuple[Role, ...]] = ("read", "submit", "node")
_JOBS: Final[tuple[Role, ...]] = ("submit", "node")
_AGENTS: Final[tuple[Role, ...]] = ("node",)
_SUBMITTERS: Final[tuple[Role, ...]] = ("submit",)
_OPERATORS: Final[tuple[Role, ...]] = ()

_NO_JOB, _NO_NODE = "`unknown`: no such job", "`unknown`: no such node"
_NO_PERMIT, _LOST = "`unknown`: no such permit", "`lost`: stop at once"
_NOT_HERE = "`unlisted`: the inventory has no such node. `unknown`: a rented node not in use"
_TAKEN = "`taken`: another agent reports the node"
_NO_ATTEMPT = "`unknown`: no such job. `no_attempt`: no such start of its program"
_NO_RUN = "`unknown`: no such job. `no_attempt`: agents run no program of it"

_PERMIT_REFUSED = (
    "`held`: another process of this job has a live permit (`token`), so ask again after `ttl_s`. "
    "`superseded`: a newer request replaced this one, so stop this old process. `over`: the permit "
    "of this key has ended, so ask with a new key. `order`: the wrong phase, see `next`. "
    "`complete`: all iterations are done. `ended`: the job is ending or ended"
)
_JOB_REFUSED = (
    "`exists`: the id is in use or was. `draining`: the cluster takes no new jobs. `too_many`: 500 "
    "jobs of the team wait for nodes. `too_large`: the cluster has too few nodes"
)
_NODE_FAILED = (
    "`failed`: stop its processes. A rented node's name is never used again, a named node may "
    "register again"
)
_NOT_YET = "not yet, so send the same request with the same key again", None

ROUTES: Final[Mapping[str, Route]] = {
    "GET /": Route(_asset, None, "", Empty, None),
    "GET /favicon.ico": Route(_icon, None, "", Empty, None),
    "GET /assets/{part}": Route(_asset, None, "", Empty, None),
    "GET /v1/health": Route(
        _health, None, "", Empty, to.Health, {503: ("the store cannot be written", to.Health)}
    ),
    "GET /v1/openapi.json": Route(_openapi, _LOOK, "", Empty, None),
    "GET /v1/status": Route(_look(views.status), _LOOK, "", Empty, to.Status),
    "GET /v1/timeline": Route(_look(views.timeline), _LOOK, "", bodies.Window, to.Timeline),
    "GET /v1/metrics": Route(_metrics, _LOOK, "", Empty, "text/plain"),
    "GET /metrics": Route(_metrics, _LOOK, "", Empty, None),
    "GET /v1/events": Route(_events, _LOOK, "", Empty, "JSON lines"),
    # The journal holds programs' environments, which may contain secrets.
    "GET /v1/journal": Route(_journal, _OPERATORS, "", bodies.After, "JSON lines"),
    "POST /v1/jobs": Route(
        _submit, _SUBMITTERS, "body", bodies.NewJob, to.Submitted, {409: _JOB_REFUSED},
        audited=True, status=201,
    ),
    "GET /v1/jobs": Route(_jobs, _LOOK, "", Empty, to.Jobs),
    "GET /v1/jobs/{job}": Route(_look(views.job), _LOOK, "", Empty, to.JobView, {404: _NO_JOB}),
    "POST /v1/jobs/{job}/permits": Route(
        _once(commands.permit, waits=True), _JOBS, "job", bodies.Ask, (to.PermitView, to.Moving),
        {204: _NOT_YET, 404: _NO_JOB, 409: _PERMIT_REFUSED},
    ),
    "POST /v1/jobs/{job}/tail": Route(
        _once(commands.tail), _JOBS, "job", bodies.TailBody, to.TailTold,
        {404: _NO_JOB, 409: _LOST},
    ),
    "POST /v1/jobs/{job}/moved": Route(
        _once(commands.moved), _JOBS, "job", bodies.MovedBody, Empty,
        {404: _NO_JOB, 409: "another move is current, given as `move`"},
    ),
    "POST /v1/jobs/{job}/end": Route(
        _once(commands.end), _JOBS, "job", Empty, to.EndedAnswer,
        {202: ("if the job holds a permit", to.EndedAnswer), 404: _NO_JOB}, audited=True,
    ),
    "POST /v1/jobs/{job}/change": Route(
        _once(commands.change), _JOBS, "job", bodies.Change, to.Changed,
        {404: _NO_JOB, 409: "`ended`: the job is ending or ended"}, audited=True,
    ),
    "POST /v1/jobs/{job}/gate": Route(
        _open_gate, _AGENTS, "", bodies.GateBody, Empty, {404: _NO_RUN}
    ),
    "GET /v1/jobs/{job}/gate": Route(
        _gate, _AGENTS, "", bodies.OfAttempt, bodies.GateBody,
        {404: f"{_NO_RUN}. `no_gate`: not yet"},
    ),
    "POST /v1/jobs/{job}/attempts/{number}/log": Route(
        _printed, _AGENTS, "", bodies.PrintedBody, to.PrintedAnswer, {404: _NO_ATTEMPT}
    ),
    "GET /v1/jobs/{job}/log": Route(_log, _LOOK, "", bodies.Piece, to.Log, {404: _NO_ATTEMPT}),
    "POST /v1/permits/{token}/heartbeat": Route(
        _heartbeat, _JOBS, "token", bodies.OfJob, to.BeatAnswer, {404: _NO_PERMIT, 409: _LOST}
    ),
    "POST /v1/permits/{token}/finish": Route(
        _once(commands.finish), _JOBS, "token", bodies.FinishedBody, to.DoneAnswer,
        {404: _NO_PERMIT, 409: _LOST},
    ),
    "POST /v1/permits/{token}/abandon": Route(
        _once(commands.abandon), _JOBS, "token", bodies.OfJob, to.GivenBack,
        {404: _NO_PERMIT, 409: _LOST},
    ),
    "POST /v1/nodes": Route(
        _once(commands.register), _AGENTS, "", bodies.NewNode, to.Registered,
        {409: f"`cloud`: the cluster rents its nodes. {_TAKEN}"}, audited=True,
    ),
    "GET /v1/nodes/{node}": Route(_look(views.node), _LOOK, "", Empty, to.NodeView),
    "POST /v1/nodes/{node}/heartbeat": Route(
        _once(commands.node_heartbeat, beat=True), _AGENTS, "", bodies.AliveBody,
        to.AliveAnswer,
        {404: _NOT_HERE, 409: _TAKEN, 410: _NODE_FAILED},
    ),
    "POST /v1/nodes/{node}/failed": Route(
        _once(commands.node_failed), _AGENTS, "", bodies.FailedBody, to.NodeGone,
        {202: ("if permits on it are live", to.NodeGone), 404: _NOT_HERE}, audited=True,
    ),
    "POST /v1/nodes/{node}/close": Route(
        _once(commands.node_closed), _OPERATORS, "", bodies.Closed, to.NodeChanged,
        {404: _NO_NODE}, audited=True,
    ),
    "POST /v1/nodes/{node}/open": Route(
        _once(commands.node_opened), _OPERATORS, "", Empty, to.NodeChanged,
        {404: _NO_NODE, 409: "`failed`: its agent must report first"}, audited=True,
    ),
    "POST /v1/nodes/{node}/remove": Route(
        _once(commands.node_removed), _OPERATORS, "", Empty, to.NodeRemovedAnswer,
        {404: _NO_NODE, 409: "`used`: jobs are on it"}, audited=True,
    ),
    "GET /v1/tokens": Route(_tokens, _OPERATORS, "", Empty, to.TokenList, audited=True),
    "POST /v1/tokens": Route(
        _new_token, _OPERATORS, "", bodies.NewToken, to.TokenMade, audited=True, status=201
    ),
    "POST /v1/tokens/revoke": Route(
        _revoke_token, _OPERATORS, "", bodies.RevokedToken, Empty,
        {404: "`unknown`: no such token"}, audited=True,
    ),
    "POST /v1/drain": Route(
        _once(commands.drain), _OPERATORS, "", bodies.Drain, to.Drained, audited=True
    ),
}  # fmt: skip


_COMMON = (
    "400: a field. 401: the token. 403 `forbidden`: the token's role or team does not allow it. "
    "408: the body came too slowly. 413: the body is too large. "
    "422: another request has used the Idempotency-Key. 431: the headers are too large. "
    "500 `poisoned`: the scheduler failed on it and changed nothing. 503 `unavailable`: the "
    "outcome is unknown, so send the same request with the same key again"
)
_TAGS = ("jobs", "permits", "nodes", "tokens")
_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": True,
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"},
}


@cache
def described() -> dict[str, Any]:
    """The API's routes as OpenAPI."""
    rows = {name: route for name, route in ROUTES.items() if route.answer is not None}
    kinds = [to.Error, *(kind for row in rows.values() for kind in _kinds_of(row))]
    schemas, components = msgspec.json.schema_components(
        dict.fromkeys(kinds), ref_template="#/components/schemas/{name}"
    )
    told = dict(zip(dict.fromkeys(kinds), schemas, strict=True))
    for name, kind in vars(to).items():
        if name in components and is_typeddict(kind):  # msgspec has sorted its fields
            fields = components[name]["properties"]
            components[name]["properties"] = {each: fields[each] for each in get_type_hints(kind)}
    paths: dict[str, dict[str, Any]] = {}
    for name, route in rows.items():
        method, path = name.split(" ")
        paths.setdefault(path, {})[method.lower()] = {
            "tags": [part if (part := path.split("/")[2]) in _TAGS else "cluster"],
            "description": inspect.cleandoc(route.act.__doc__ or ""),
        } | _operation(name, route, told, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "RollMux", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _kinds_of(route: Route) -> list[Any]:
    answer = route.answer if isinstance(route.answer, tuple) else (route.answer,)
    others = (each[1] for each in route.errors.values() if isinstance(each, tuple))
    kinds = (route.body, *answer, *others)
    return [kind for kind in kinds if kind is not None and not isinstance(kind, str)]


def _operation(
    name: str,
    route: Route,
    kinds: Mapping[Any, dict[str, Any]],
    components: Mapping[str, dict[str, Any]],
) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = []
    for part in re.findall(r"{(\w+)}", name):
        schema = {"type": "string" if IDENTIFIERS[part][1] is str else "integer"}
        parameters.append({"name": part, "in": "path", "required": True, "schema": schema})
    found: dict[str, Any] = {"parameters": parameters, "responses": _responses(route, kinds)}
    if name.startswith("POST"):
        parameters.append(_KEY)
        if route.body is not Empty:
            found["requestBody"] = {"content": {"application/json": {"schema": kinds[route.body]}}}
    elif route.body is not Empty:
        query = components[route.body.__name__]
        for key, schema in query["properties"].items():
            told = {"name": key, "in": "query", "required": key in query["required"]}
            parameters.append(told | {"schema": schema})
    return found


def _responses(route: Route, kinds: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    def answered(text: str, kind: Any = to.Error) -> dict[str, Any]:
        if kind is None:
            return {"description": text}
        several = {"anyOf": [kinds[each] for each in kind]} if isinstance(kind, tuple) else None
        schema = several or kinds[kind]
        return {"description": text, "content": {"application/json": {"schema": schema}}}

    done = (route.answer, None) if isinstance(route.answer, str) else ("done", route.answer)
    told: dict[int, Any] = {route.status: done, **route.errors}
    found = {
        f"{status}": answered(each) if isinstance(each, str) else answered(*each)
        for status, each in told.items()
    }
    return found | {"default": answered(_COMMON)}
