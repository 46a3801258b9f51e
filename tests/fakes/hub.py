"""A hub on loopback with the part of Hugging Face's API that downloads need."""

from __future__ import annotations

import hashlib
import json
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlparse

import pytest

from primad.gguf import hub as hub_module
from tests.fakes.http import answering

PATIENCE_S = 180.0
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Repositories by name, each with its files by name. ``gated`` ones ask for consent; ``stated`` has false hashes.

    Settings per file: ``cut`` closes the connection after so many bytes, once; ``after`` refuses bytes from this offset
    on; requests for files in ``gates`` are noted in ``waits`` and wait for the gate.

    ``ranges``: whether range requests work; ``elsewhere``: the URL of another hub to redirect file requests to.
    ``statuses`` are each returned once instead of a file. ``asked`` records the requests, ``tokens`` their credentials.
    """

    repositories: dict[str, dict[str, bytes]]
    gated: frozenset[str] = frozenset()
    stated: dict[str, str] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    ranges: bool = True
    elsewhere: str = ""
    statuses: list[int] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    after: dict[str, int] = field(default_factory=dict)
    gates: dict[str, threading.Event] = field(default_factory=dict)
    waits: queue.Queue[str] = field(default_factory=queue.Queue)
    endpoint: str = ""

    @property
    def given_ranges(self) -> list[range]:
        """The ranges in requests for files."""
        ends = [part.removeprefix("bytes=").split("-") for _, path, part in self.asked if "resolve" in path and part]
        return [range(int(first), int(last) + 1) for first, last in ends]

    @property
    def given_bytes(self) -> int:
        """The number of bytes in these ranges."""
        return sum(map(len, self.given_ranges))


@contextmanager
def own_hub(monkeypatch: pytest.MonkeyPatch, repositories: dict[str, dict[str, bytes]]) -> Iterator[FakeHub]:
    """Make this hub the default, also for processes started from now on. Long timeouts keep a stalled machine from
    looking like a dead hub."""
    with serving(FakeHub(repositories)) as fake:
        monkeypatch.setenv("HF_ENDPOINT", fake.endpoint)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(hub_module, "ANSWER_TIMEOUT_S", PATIENCE_S)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT", int(PATIENCE_S))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", int(PATIENCE_S))
        yield fake


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client may leave
            super().handle_error(request, client_address)


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve ``hub`` on a free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(has_body=False)

        def do_GET(self) -> None:
            self._answer(has_body=True)

        def _answer(self, *, has_body: bool) -> None:
            parts = unquote(urlparse(self.path).path).strip("/").split("/")
            hub.tokens.append(self.headers.get("Authorization", ""))
            hub.asked.append((self.command, "/".join(parts), self.headers.get("Range", "")))
            if parts[:2] == ["api", "models"]:
                self._notify("/".join(parts[2:4]))
            else:
                self._give("/".join(parts[:2]), "/".join(parts[4:]), has_body=has_body)

        def _refuse(self, status: int, code: str) -> None:
            self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code}, has_body=self.command == "GET")

        def _known(self, repo: str) -> dict[str, bytes] | None:
            if repo not in hub.repositories:
                self._refuse(404, "RepoNotFound")
                return None
            return hub.repositories[repo]

        def _notify(self, repo: str) -> None:
            files = self._known(repo)
            if files is None:
                return
            siblings = [
                {
                    "rfilename": name,
                    "size": len(data),
                    "lfs": {
                        "sha256": hub.stated.get(name, hashlib.sha256(data).hexdigest()),
                        "size": len(data),
                        "pointerSize": 134,
                    },
                }
                for name, data in files.items()
            ]
            body = json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode()
            self._send(200, body, {"Content-Type": "application/json"}, has_body=True)

        def _give(self, repo: str, name: str, *, has_body: bool) -> None:
            files = self._known(repo)
            if files is None:
                return
            if repo in hub.gated:
                self._refuse(403, "GatedRepo")
                return
            if hub.statuses:
                self._send(hub.statuses.pop(0), b"", {}, has_body=has_body)
                return
            if has_body and name in hub.gates:
                hub.waits.put(name)
                assert hub.gates[name].wait(PATIENCE_S)
            data = files[name]
            asked = self.headers.get("Range") if hub.ranges else None
            begin, _, end = (asked or "bytes=0-").removeprefix("bytes=").partition("-")
            first, last = int(begin), min(int(end or len(data)), len(data) - 1)
            if has_body and last >= hub.after.get(name, len(data)):
                self._send(503, b"", {}, has_body=True)
                return
            headers = {
                "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
                "X-Repo-Commit": COMMIT,
                "Accept-Ranges": "bytes",
                "Content-Range": f"bytes {first}-{last}/{len(data)}",
            }
            if hub.elsewhere:
                headers |= {"X-Linked-ETag": headers["ETag"], "Location": hub.elsewhere + self.path}
                self._send(302, b"", headers, has_body=has_body)
                return
            cut = hub.cut.pop(name, None) if has_body and (end or not first) else None
            self._send(200 if asked is None else 206, data[first : last + 1], headers, has_body=has_body, cut=cut)

        def _send(
            self, status: int, body: bytes, headers: dict[str, str], *, has_body: bool, cut: int | None = None
        ) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if has_body:
                self.wfile.write(body if cut is None else body[:cut])
            if cut is not None:
                self.close_connection = True

    with answering(_Server(("127.0.0.1", 0), Handler)) as hub.endpoint:
        yield hub
