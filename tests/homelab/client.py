"""The client that tests run on the head's device: prints one JSON line with the time of each event.

    client.py health URL                status and body of the health check; status 0 without a response
    client.py wait URL SECONDS [DETAIL] the same, once the status is 200 (with DETAIL) or at the timeout
    client.py chat URL BODY             request a streamed chat completion; BODY is JSON
    client.py status URL                the response of /status
    client.py slots URL                 the response of /slots

``chat`` prints ``{"at": seconds, "status": 200}``, then ``{"at": ..., "event": {...}}`` for each event, finally
``{"at": ..., "end": how}``: ``done`` (after [DONE]), ``closed`` (without [DONE]) or the connection's error. Times are
of ``time.monotonic``, one clock for the whole machine.
"""

# ruff: noqa: T201
from __future__ import annotations

import http.client
import json
import sys
import time
import urllib.parse

_SILENCE_S = 300.0
_ANSWER_S = 30.0
_LOOK_S = 0.05
"""Interval of health checks, the precision of the time at which serving begins."""


def _connect(url: str, timeout_s: float) -> http.client.HTTPConnection:
    parts = urllib.parse.urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)


def _get(url: str, path: str) -> dict[str, object]:
    connection = _connect(url, _ANSWER_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = json.loads(answer.read())
        return {
            "at": time.monotonic(),
            "status": answer.status,
            "retry_after": answer.getheader("Retry-After"),
            "body": body,
        }
    except (OSError, http.client.HTTPException) as exc:
        return {"at": time.monotonic(), "status": 0, "retry_after": None, "body": {"detail": repr(exc)}}
    finally:
        connection.close()


def _wait(url: str, seconds: float, detail: str = "") -> dict[str, object]:
    deadline = time.monotonic() + seconds
    while True:
        found = _get(url, "/health")
        body = found["body"]
        serves = found["status"] == 200 and (not detail or (isinstance(body, dict) and body["detail"] == detail))
        if serves or time.monotonic() >= deadline:
            return found
        time.sleep(_LOOK_S)


def _chat(url: str, body: str) -> None:
    def notify(**what: object) -> None:
        print(json.dumps({"at": time.monotonic(), **what}), flush=True)

    connection = _connect(url, _SILENCE_S)
    end = "closed"
    try:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        notify(status=answer.status, retry_after=answer.getheader("Retry-After"))
        if answer.status != 200:
            notify(event=json.loads(answer.read()))
        for line in iter(answer.readline, b""):
            data = line.decode().rstrip("\r\n").removeprefix("data: ")
            if data == "[DONE]":
                end = "done"
            elif line.startswith(b"data: "):
                notify(event=json.loads(data))
    except (OSError, http.client.HTTPException) as exc:
        end = repr(exc)
    finally:
        connection.close()
    notify(end=end)


if __name__ == "__main__":
    action, url, *rest = sys.argv[1:]
    if action == "chat":
        _chat(url, *rest)
    elif action == "wait":
        print(json.dumps(_wait(url, float(rest[0]), *rest[1:])), flush=True)
    else:
        print(json.dumps(_get(url, f"/{action}")), flush=True)
