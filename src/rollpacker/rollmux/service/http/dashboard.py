"""The dashboard: static files of the package, nothing from elsewhere."""

from __future__ import annotations

from importlib.resources import files
from pathlib import PurePath

from fastapi import FastAPI
from fastapi.responses import Response

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}


def add(app: FastAPI) -> None:
    """Serve the page and its parts."""
    folder = files("rollpacker.rollmux.service").joinpath("assets")
    content = {part.name: part.read_bytes() for part in folder.iterdir()}

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
