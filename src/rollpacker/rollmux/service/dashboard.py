"""The dashboard: static files of the package, nothing from elsewhere."""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI
from fastapi.responses import Response

_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "dashboard.css": "text/css; charset=utf-8",
    "dashboard.js": "text/javascript; charset=utf-8",
    "gantt.js": "text/javascript; charset=utf-8",
}


def add(app: FastAPI) -> None:
    """Serve the page and its parts."""
    folder = files("rollpacker.rollmux.service").joinpath("assets")
    content = {name: folder.joinpath(name).read_bytes() for name in _TYPES}

    @app.get("/")
    async def page() -> Response:
        return Response(content["index.html"], media_type=_TYPES["index.html"])

    @app.get("/favicon.ico")
    async def icon() -> Response:
        return Response(status_code=204)

    @app.get("/assets/{name}")
    async def asset(name: str) -> Response:
        if name not in content:
            return Response(status_code=404)
        return Response(content[name], media_type=_TYPES[name])
