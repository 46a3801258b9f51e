"""The static files of the page, read once. They use no other host and need no build.

The content security policy allows only this server's scripts, styles and responses, and nothing inline. Model output
passes a sanitiser whose result is the only text that may become HTML (Trusted Types). Host names in links of that text
are looked up only on a click.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from primad.errors import RequestError

FOLDER: Final = Path(__file__).parent / "static"
INDEX: Final = "index.html"
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "media-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
_HEADERS: Final = {
    "cache-control": "no-cache",
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(self)",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-dns-prefetch-control": "off",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    tag: str


@cache
def files() -> dict[str, _File]:
    """Return every file by its path below the folder."""
    found = {}
    for path in FOLDER.rglob("*"):
        if path.suffix in _TYPES:
            content = path.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[path.relative_to(FOLDER).as_posix()] = _File(content, _TYPES[path.suffix], tag)
    return found


def response(request: Request, name: str) -> Response:
    """Return the file ``name``, or 304 if the browser has it. Raises ``RequestError`` (404)."""
    file = files().get(name)
    if file is None:
        raise RequestError(f"no such file of the page: {name[:200]}", status=404)
    headers = _HEADERS | {"etag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)


def wants_page(request: Request) -> bool:
    """Whether the client is a browser and not an API client."""
    return "text/html" in request.headers.get("accept", "")
