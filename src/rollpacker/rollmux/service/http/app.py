"""The HTTP application: routes, each one command to the writer or one look at the state."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator
from contextlib import suppress
from functools import partial
from importlib.resources import files
from pathlib import PurePath

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from starlette.concurrency import iterate_in_threadpool
from starlette.exceptions import HTTPException

from rollpacker.rollmux.service.api import answers, bodies
from rollpacker.rollmux.service.api import route_docs as docs
from rollpacker.rollmux.service.api.access_table import ROUTES
from rollpacker.rollmux.service.api.bodies import Key, Post
from rollpacker.rollmux.service.api.refused import Refused
from rollpacker.rollmux.service.commands import commands, node_commands
from rollpacker.rollmux.service.commands.writer import Outcome, Writer
from rollpacker.rollmux.service.http import gates, logs
from rollpacker.rollmux.service.http.routing import Route, answered, looks, no_route
from rollpacker.rollmux.service.views import history, views
from rollpacker.rollmux.service.views.metrics import Metrics

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_EMPTY, _WHY, _DRAIN, _ALIVE = (
    bodies.Empty(),
    bodies.FailedBody(),
    bodies.Drain(),
    bodies.AliveBody(),
)


def make_app(writer: Writer, metrics: Metrics, printed: logs.Logs) -> FastAPI:
    """The application; it has no guard of its own."""
    app = FastAPI(
        title="RollMux",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        separate_input_output_schemas=False,
    )
    app.router.route_class = Route
    app.router.redirect_slashes = False
    app.router.default = no_route
    app.state.looks = looks()
    _add_errors(app)
    _add_jobs(app, writer)
    _add_permits(app, writer)
    _add_nodes(app, writer)
    _add_views(app, writer, metrics)
    _add_logs(app, writer)
    logs.add(app, writer, printed)
    gates.add(app, writer)
    _add_dashboard(app)
    _check_table(app)
    return app


def _check_table(app: FastAPI) -> None:
    """What is served is what the table has, no more and no less."""
    routes = [route for route in app.routes if isinstance(route, Route)]
    assert len(routes) == len(app.routes)
    served = {route.name_in_table for route in routes}
    assert served == set(ROUTES), served ^ set(ROUTES)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return answered(error.status, error.body)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return answered(400, {"error": bodies.problem(error.errors())})

    @app.exception_handler(HTTPException)
    async def other(_: Request, error: HTTPException) -> Response:
        return answered(error.status_code, {"error": f"{error.detail}; see docs/mux_api.md"})


async def _post(
    writer: Writer,
    asked: Post,
    act: Callable[..., Outcome],
    *what: object,
    wait_s: float | None = None,
) -> Response:
    """Carry out once, answer after the commit."""
    command = lambda core: commands.once(core, asked, lambda: act(core, asked, *what))  # noqa: E731
    answer = await writer.call(command, wait_s)
    return answered(204, None) if answer is None else answered(answer.status, answer.body)


def _add_jobs(app: FastAPI, writer: Writer) -> None:
    post = partial(_post, writer)

    @app.post("/v1/jobs", **docs.SUBMIT)
    async def submit(body: bodies.NewJob, asked: Key) -> Response:
        """Submit a job; where it does not fit yet it waits for nodes."""
        commands.own_team(asked, body.model_dump(include={"team"})["team"])
        return await post(asked, commands.submit, body)

    @app.get("/v1/jobs", **docs.JOBS)
    async def jobs() -> Response:
        """All jobs, those that ended too."""
        return answered(200, await views.all_jobs(writer.read))

    @app.get("/v1/jobs/{job}", **docs.JOB)
    async def job_of(job: str) -> Response:
        """One job."""
        return answered(200, await writer.read(lambda core: views.job(core, job)))

    @app.post("/v1/jobs/{job}/permits", **docs.PERMITS)
    async def permits(job: str, body: bodies.Ask, asked: Key) -> Response:
        """Ask for a phase: a permit, a move that has to come first, or not yet.

        Deadline of a permit: your clock just before you sent this request, and ``ttl_s``. After a
        move, repeat the request with the same key; after one for a ``failure`` with a new key: the
        iteration begins again with a rollout.
        """
        # A lease counts from when it was asked for: a late answer would be worth nothing.
        wait_s = min(body.wait_s, writer.core.ttl / 3)
        return await post(asked, commands.permit, job, body.phase, wait_s=wait_s)

    @app.post("/v1/jobs/{job}/tail", **docs.TAIL)
    async def tail(job: str, body: bodies.TailBody, asked: Key) -> Response:
        """About 80% of the responses of the running rollout are done."""
        return await post(asked, commands.tail, job, body)

    @app.post("/v1/jobs/{job}/moved", **docs.MOVED)
    async def moved(job: str, body: bodies.MovedBody, asked: Key) -> Response:
        """The state is loaded on the new nodes."""
        return await post(asked, commands.moved, job, body)

    @app.post("/v1/jobs/{job}/end", **docs.END)
    async def end(job: str, asked: Key, _: bodies.Empty = _EMPTY) -> Response:
        """The job is done, or cancelled."""
        return await post(asked, commands.end, job)


def _add_permits(app: FastAPI, writer: Writer) -> None:
    post = partial(_post, writer)

    @app.post("/v1/permits/{token}/heartbeat", **docs.HEARTBEAT)
    async def heartbeat(token: int, asked: Key, _: bodies.Empty = _EMPTY) -> Response:
        """Give a lease its full time again, about every third of it.

        Each with a fresh key: a repeated one extends nothing.
        """
        answer = await writer.call(lambda core: commands.heartbeat(core, token, asked))
        assert answer is not None
        return answered(answer.status, answer.body)

    @app.post("/v1/permits/{token}/finish", **docs.FINISH)
    async def finish(token: int, body: bodies.FinishedBody, asked: Key) -> Response:
        """The phase is over."""
        return await post(asked, commands.finish, token, body)

    @app.post("/v1/permits/{token}/abandon", **docs.ABANDON)
    async def abandon(token: int, asked: Key, _: bodies.Empty = _EMPTY) -> Response:
        """The phase is given back unfinished: it has to be asked for again."""
        return await post(asked, commands.abandon, token)


def _add_nodes(app: FastAPI, writer: Writer) -> None:
    post = partial(_post, writer)

    @app.get("/v1/nodes/{node}", **docs.NODE)
    async def node_of(node: str) -> Response:
        """One node, also one that nobody knows."""
        return answered(200, await writer.read(lambda core: views.node(core, node)))

    @app.post("/v1/nodes", **docs.REGISTER)
    async def register(body: bodies.NewNode, asked: Key) -> Response:
        """A named node's agent says what the node is.

        One that has less than the inventory says, or failed three times within an hour, is set
        aside.
        """
        return await post(asked, node_commands.register, body)

    @app.post("/v1/nodes/{node}/close", **docs.CLOSE)
    async def close(node: str, body: bodies.Closed, asked: Key) -> Response:
        """Nothing new comes to the node.

        Jobs on a draining one get others between two iterations, as soon as there are some.
        """
        return await post(asked, node_commands.node_closed, node, body)

    @app.post("/v1/nodes/{node}/open", **docs.OPEN)
    async def opened(node: str, asked: Key, _: bodies.Empty = _EMPTY) -> Response:
        """The node is used again."""
        return await post(asked, node_commands.node_opened, node)

    @app.post("/v1/nodes/{node}/remove", **docs.REMOVE)
    async def removed(node: str, asked: Key, _: bodies.Empty = _EMPTY) -> Response:
        """The node leaves the inventory."""
        return await post(asked, node_commands.node_removed, node)

    @app.post("/v1/nodes/{node}/heartbeat", **docs.NODE_BEAT)
    async def heartbeat(node: str, asked: Key, body: bodies.AliveBody = _ALIVE) -> Response:
        """The node's agent lives; once it has reported, its silence is a failure.

        Where it starts programs it is told which belong there.
        """
        return await post(asked, node_commands.node_heartbeat, node, body)

    @app.post("/v1/nodes/{node}/failed", **docs.FAILED)
    async def failed(node: str, asked: Key, _: bodies.FailedBody = _WHY) -> Response:
        """The node is gone with all that was on it."""
        return await post(asked, node_commands.node_failed, node)

    @app.post("/v1/drain", **docs.DRAIN)
    async def drain(asked: Key, body: bodies.Drain = _DRAIN) -> Response:
        """Turn new jobs away, or no longer; live ones go on."""
        return await post(asked, commands.drain, body)


def _add_views(app: FastAPI, writer: Writer, metrics: Metrics) -> None:
    @app.get("/v1/health", **docs.HEALTH)
    async def health() -> Response:
        """Whether the daemon can work; needs no token."""
        if not writer.alive:
            return answered(503, answers.Health(status="the store cannot be written"))
        return answered(200, answers.Health(status=writer.ailing or "ok"))

    @app.get("/v1/status", **docs.STATUS)
    async def status() -> Response:
        """The whole cluster: pools, queue, teams, groups, jobs."""
        return answered(200, await writer.read(views.status))

    @app.get("/v1/timeline", **docs.TIMELINE)
    async def timeline(
        window_s: bodies.Seconds = 600.0, job: bodies.Name = "", node: bodies.Name = ""
    ) -> Response:
        """Phases of the last seconds; of a job or a node only, where one is named."""
        return answered(
            200, await writer.read(lambda core: views.timeline(core, window_s, job, node))
        )

    @app.get("/v1/openapi.json", include_in_schema=False)
    async def described() -> Response:
        return answered(200, app.openapi())

    @app.get("/metrics", include_in_schema=False)
    @app.get("/v1/metrics", **docs.METRICS)
    async def numbers() -> Response:
        """Numbers for Prometheus, also at ``/metrics``."""
        return Response(await metrics.text(writer), media_type="text/plain; version=0.0.4")


def _add_logs(app: FastAPI, writer: Writer) -> None:
    @app.get("/v1/journal", **docs.LINES)
    def journal(after: bodies.Count = 0) -> Response:
        """What was recorded after an entry, JSON lines; replayable."""
        return _stream(history.journal(writer.core.store.reader(), after))

    @app.get("/v1/events", **docs.LINES)
    def events() -> Response:
        """The event log, JSON lines: rollpacker mux check reads it."""
        return _stream(history.event_log(writer.core.store.reader(), writer.core.settings))


def _stream(lines: Generator[str, None, None]) -> Response:
    """A piece at a time; the store's reader is closed also where nobody reads on."""

    async def pieces() -> AsyncIterator[str]:
        try:
            async for piece in iterate_in_threadpool(lines):
                yield piece
        finally:
            with suppress(ValueError):  # a thread is at it, and closes it when it is over
                lines.close()

    return StreamingResponse(pieces(), media_type="application/jsonl")


def _add_dashboard(app: FastAPI) -> None:
    """The page and its parts: files of the package, nothing from elsewhere."""
    folder = files("rollpacker.rollmux.service").joinpath("assets")
    parts = [*folder.iterdir(), *folder.joinpath("views").iterdir()]
    content = {part.name: part.read_bytes() for part in parts if part.is_file()}

    def file(name: str) -> Response:
        return Response(content[name], media_type=_TYPES[PurePath(name).suffix])

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return file("index.html")

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        return Response(status_code=204)

    @app.get("/assets/{part}", include_in_schema=False)
    async def asset(part: str) -> Response:
        return file(part) if part in content else Response(status_code=404)
