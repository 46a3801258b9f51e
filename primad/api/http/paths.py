"""Normalises paths that come from base URLs as people paste them: ``http://host/`` before ``/v1/models`` makes
``//v1/models``; some end with a slash."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send


class TidyPaths:
    """Removes superfluous slashes from paths for ``app``. It must run before everything that decides by the path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (tidied := tidy(scope["path"])) != scope["path"]:
            raw = tidy(scope.get("raw_path", b"").decode("latin-1")).encode("latin-1")
            scope = {**scope, "path": tidied, "raw_path": raw}
        await self._app(scope, receive, send)


def tidy(path: str) -> str:
    """Return ``path`` with single slashes and none at its end."""
    return re.sub("/{2,}", "/", path).rstrip("/") or "/"
