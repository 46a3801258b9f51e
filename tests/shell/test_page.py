"""The page over HTTP: its files, access, tickets, and one status query a second for all listeners."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from urllib.parse import urljoin

import pytest

from primad.api.app import create_app
from primad.api.http.access import OPEN, Admission, Door
from primad.api.http.keys import ApiKey, digest_of
from primad.api.http.status import StatusBody, decoder
from primad.api.page import files
from primad.api.page.owner import TICKET_S, Owner
from primad.api.page.routes import MAX_ASKED_BYTES
from primad.api.page.watch import MAX_LISTENERS, Snapshot, Watch
from primad.errors import RequestError, RingError
from primad.settings.timings import ApiTimings
from tests.fakes.admin_api import FakeAdminApi, known
from tests.fakes.backend import FakeBackend, replies
from tests.fakes.http import ask
from tests.fakes.status import device, ring

OWNER, GUEST = "the-owner's-key-is-long", "a-guest's-key-is-long"
BROWSER = {"accept": "text/html,application/xhtml+xml"}
PATIENCE_S = 180


def app_of(*keys: ApiKey, origins=(), **more):
    """The app with an owner; with ``keys``, it requires one."""
    admission = Admission(door=Door(lambda: keys) if keys else OPEN, origins=origins, owner_key=OWNER)
    return create_app(FakeBackend(replies("Hi")), admission=admission, **more)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# ---- files ----------------------------------------------------------------------------------------------------------


def test_a_browser_gets_the_page_and_a_client_of_the_api_a_description():
    page = ask(app_of(), "GET", "/", headers=BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "<title>primad</title>" in page.text
    assert ask(app_of(), "GET", "/").json()["name"] == "primad"


def test_everything_that_the_page_loads_is_a_file_of_this_server():
    texts = {name: file.content.decode() for name, file in files.files().items() if not name.startswith("vendor/")}
    of_index = re.findall(r'(?:src|href)="([^"#]+)"', texts[files.INDEX])
    of_scripts = [
        urljoin("/page/js/", each) for text in texts.values() for each in re.findall(r' from "([^"]+)"', text)
    ]
    assert not any(path.startswith("/") for path in of_index), "a proxy may serve the page below a prefix"
    loaded = {urljoin("/", path) for path in of_index} | set(of_scripts)
    assert {f"/page/{name}" for name in texts if name.endswith((".js", ".css", ".svg"))} <= loaded
    for path in loaded:
        assert ask(app_of(), "GET", path).status_code == 200, path
    for name, text in texts.items():
        assert not set(re.findall(r"https?://[^\s\"'`)]+", text)) - {"http://www.w3.org/2000/svg"}, name


def test_nothing_on_the_page_is_inline_and_the_policy_forbids_it():
    answer = ask(app_of(), "GET", "/", headers=BROWSER)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\bsrc=)", answer.text)
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_each_vendored_file_has_its_licence_next_to_it():
    vendored = list((files.FOLDER / "vendor").glob("*.js"))
    assert vendored
    assert all(path.with_suffix(".LICENSE").is_file() for path in vendored)


def test_a_file_that_the_browser_has_is_not_sent_again():
    first = ask(app_of(), "GET", "/page/page.css")
    again = ask(app_of(), "GET", "/page/page.css", headers={"if-none-match": first.headers["etag"]})
    assert (first.status_code, again.status_code, again.content) == (200, 304, b"")


@pytest.mark.parametrize(
    "path", ["nothing.js", "", "../routes.py", "..%2froutes.py", "%2e%2e/routes.py", "/etc/passwd"]
)
def test_no_other_file_is_served(path):
    assert ask(app_of(), "GET", f"/page/{path}").status_code == 404


# ---- access ---------------------------------------------------------------------------------------------------------


def test_with_api_keys_the_page_loads_and_reveals_nothing():
    app = app_of(ApiKey(name="guest", digest=digest_of(GUEST)))
    assert ask(app, "GET", "/", headers=BROWSER).status_code == 200
    assert ask(app, "GET", "/page/js/main.js").status_code == 200
    assert ask(app, "GET", "/ui/events").status_code == 401
    assert ask(app, "GET", "/ui/who").status_code == 401
    assert ask(app, "GET", "/ui/who", headers=bearer(GUEST)).json() == {"is_owner": False}


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "null"},
        {"origin": "http://["},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
    ids=["host", "port", "null", "no address", "cross", "same-site"],
)
@pytest.mark.parametrize(("method", "path"), [("GET", "/ui/events"), ("GET", "/ui/who"), ("POST", "/ui/ticket")])
def test_pages_of_other_origins_are_refused_even_if_they_may_use_the_api(method, path, headers):
    app = app_of(origins=("http://evil.example",))
    answer = ask(
        app, method, path, headers=headers | bearer(OWNER) | {"content-type": "application/json"}, content="{}"
    )
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "foreign_origin"


def test_only_the_owner_gets_a_ticket_and_it_works_once():
    app = app_of()
    assert ask(app, "POST", "/ui/ticket", json={}).status_code == 403
    assert ask(app, "POST", "/ui/ticket", json={}, headers=bearer(GUEST)).json()["error"]["code"] == "not_the_owner"
    ticket = ask(app, "POST", "/ui/ticket", json={}, headers=bearer(OWNER)).json()
    here = {"origin": "http://127.0.0.1:8080", "sec-fetch-site": "same-origin"}
    assert ask(app, "POST", "/ui/owner", json=ticket, headers=here).json() == {"key": OWNER}
    assert ask(app, "POST", "/ui/owner", json=ticket, headers=here).json()["error"]["code"] == "ticket_over"
    assert ask(app, "GET", "/ui/who", headers=bearer(OWNER)).json() == {"is_owner": True}


def test_a_ticket_expires_and_none_is_valid_without_an_owner():
    now = [0.0]
    owner = Owner(OWNER, clock=lambda: now[0])
    late, early = owner.ticket(), owner.ticket()
    now[0] = TICKET_S - 1
    assert owner.key_for(early) == OWNER
    now[0] = TICKET_S
    with pytest.raises(RequestError, match="primad page"):
        owner.key_for(late)
    nobody = Owner(None)
    assert not nobody.is_owner(OWNER)
    with pytest.raises(RequestError):
        nobody.key_for(nobody.ticket())


@pytest.mark.parametrize(
    "request_",
    [
        {"data": {"a": "b"}},
        {"content": "{}", "headers": {"content-type": "text/plain"}},
        {"json": []},
        {"json": {"a": 1}},
    ],
    ids=["form", "text", "list", "unknown"],
)
def test_a_change_must_be_sent_as_json(request_):
    headers = request_.pop("headers", {}) | bearer(OWNER)
    assert ask(app_of(), "POST", "/ui/ticket", headers=headers, **request_).status_code == 400


@pytest.mark.parametrize("path", ["/ui/owner", "/ui/what-if", "/ui/forecast", "/ui/ticket"])
def test_a_large_request_of_the_page_is_refused(path):
    answer = ask(app_of(), "POST", path, headers=bearer(OWNER), json={"profiles": ["a"] * MAX_ASKED_BYTES})
    assert answer.status_code == 413


# ---- devices --------------------------------------------------------------------------------------------------------

CHANGES = ("/ui/pair", "/ui/bring", "/ui/trust", "/ui/revoke", "/ui/lend")


@pytest.mark.parametrize("key", [None, GUEST], ids=["nobody", "guest"])
def test_nobody_but_the_owner_sees_or_changes_devices(key):
    admin_api = FakeAdminApi([known("mini")])
    app = app_of(admin_api=admin_api)
    headers = bearer(key) if key else {}
    assert ask(app, "GET", "/ui/devices", headers=headers).json()["error"]["code"] == "not_the_owner"
    for path in CHANGES:
        answer = ask(app, "POST", path, headers=headers, json={"device": "mini", "key": admin_api.known[0].key})
        assert answer.status_code == 403
    assert not admin_api.calls


def test_the_owner_shows_a_code_approves_and_revokes():
    mini, sofa = known("mini"), known("sofa", "no")
    admin_api = FakeAdminApi([mini, sofa])
    app, owner = app_of(admin_api=admin_api), bearer(OWNER)
    assert ask(app, "POST", "/ui/pair", headers=owner, json={}).json()["code"] == "7-lamp-river"
    assert ask(app, "POST", "/ui/trust", headers=owner, json={"device": "sofa", "key": sofa.key}).status_code == 200
    assert ask(app, "POST", "/ui/revoke", headers=owner, json={"device": "mini", "key": mini.key}).status_code == 200
    body = ask(app, "GET", "/ui/devices", headers=owner).json()
    assert {each["device"]: each["trusted"] for each in body["devices"]} == {"mini": "revoked", "sofa": "yes"}
    assert body["code"]["port"] == 7771


def test_the_owner_brings_the_code_that_another_device_shows():
    admin_api = FakeAdminApi()
    app, owner = app_of(admin_api=admin_api), bearer(OWNER)
    wrong = ask(app, "POST", "/ui/bring", headers=owner, json={"code": "7-lamp-river"})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (409, "refused")
    shown = {"code": "9-maple-stone", "at": "192.168.1.20:41234"}
    assert ask(app, "POST", "/ui/bring", headers=owner, json=shown).json() == {"device": "sofa"}
    (sofa,) = ask(app, "GET", "/ui/devices", headers=owner).json()["devices"]
    assert sofa["trusted"] == "yes"


def test_the_owner_pauses_a_device_and_caps_its_memory():
    admin_api = FakeAdminApi([known("mini")])
    app, owner = app_of(admin_api=admin_api), bearer(OWNER)
    device_limit = {"device": "mini", "is_paused": True, "ram_bytes": 4_000_000_000}
    assert ask(app, "POST", "/ui/lend", headers=owner, json=device_limit).status_code == 200
    (mini,) = ask(app, "GET", "/ui/devices", headers=owner).json()["devices"]
    assert (mini["is_paused"], mini["ram_bytes"]) == (True, 4_000_000_000)


def test_every_client_may_request_a_what_if_forecast():
    app = app_of(admin_api=FakeAdminApi([known("mini"), known("laptop")]))
    without = ask(app, "POST", "/ui/what-if", json={"without": ["mini"]}).json()
    assert without["tokens_per_s"] < without["now_tokens_per_s"]
    assert [each["device"] for each in without["devices"]] == ["desk", "laptop"]
    profiles = ask(app, "GET", "/ui/profiles").json()["profiles"]
    more = ask(app, "POST", "/ui/what-if", json={"profiles": profiles[:1]}).json()
    assert more["tokens_per_s"] > more["now_tokens_per_s"]
    none = ask(app, "POST", "/ui/what-if", json={"without": ["mini", "laptop"]})
    assert (none.status_code, none.json()["error"]["message"][:22]) == (409, "there is no such plan:")
    foreign = ask(app, "POST", "/ui/what-if", json={}, headers={"origin": "http://evil.example"})
    assert foreign.status_code == 403


def test_a_refusal_of_the_daemon_is_reported_and_no_internal_error():
    app = app_of(admin_api=FakeAdminApi())
    answer = ask(app, "POST", "/ui/revoke", headers=bearer(OWNER), json={"device": "mini", "key": "00"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "refused")
    assert ask(app_of(), "POST", "/ui/pair", headers=bearer(OWNER), json={}).status_code == 404


# ---- events ---------------------------------------------------------------------------------------------------------


class Looks:
    """Counts status queries, and fails on request."""

    def __init__(self) -> None:
        self.count = 0
        self.fails = False

    async def __call__(self) -> StatusBody:
        self.count += 1
        if self.fails:
            raise RingError("broken")
        return StatusBody(serving=True, detail=str(self.count), model=None)


def detail(snapshot: Snapshot) -> str:
    return decoder.decode(snapshot.json).detail


async def test_all_listeners_share_one_status_query_and_without_listeners_there_is_none():
    looks = Looks()
    watch = Watch(looks, 0.001)
    one, other = watch.snapshots(), watch.snapshots()
    async with asyncio.timeout(PATIENCE_S), aclosing(one), aclosing(other):
        tasks = [asyncio.create_task(anext(each)) for each in (one, other)]
        assert {detail(snapshot) for snapshot in await asyncio.gather(*tasks)} == {"1"}
        assert int(detail(await anext(one))) > 1
    ended = looks.count
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert looks.count <= ended + 1
    async with asyncio.timeout(PATIENCE_S), aclosing(watch.snapshots()) as again:
        assert int(detail(await anext(again))) > ended


async def test_a_failed_status_query_ends_the_streams_and_new_ones_work():
    looks = Looks()
    looks.fails = True
    watch = Watch(looks, 0.001)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(RingError):
            await anext(watch.snapshots())
        looks.fails = False
        async with aclosing(watch.snapshots()) as again:
            assert detail(await anext(again)) == "2"


async def test_streams_end_when_the_server_does():
    watch = Watch(Looks(), 3600.0)
    stream = watch.snapshots()
    async with asyncio.timeout(PATIENCE_S):
        await anext(stream)
        waiting = asyncio.create_task(anext(stream, None))
        await asyncio.sleep(0)
        watch.close()
        assert await waiting is None
        assert await anext(watch.snapshots(), None) is None


async def test_pages_that_listen_are_bounded():
    watch = Watch(Looks(), 0.001)
    streams: list[AsyncGenerator[Snapshot, None]] = [watch.snapshots() for _ in range(MAX_LISTENERS)]
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(anext(each) for each in streams))
        with pytest.raises(RequestError, match="pages are open"):
            await anext(watch.snapshots())
        for each in streams:
            await each.aclose()
        async with aclosing(watch.snapshots()) as again:
            await anext(again)


async def test_the_stream_has_the_status():
    backend = FakeBackend(replies("Hi"))
    backend.ring = ring(device("desk", role="head"), device("mini"))
    app = create_app(backend, timings=ApiTimings(page_every_s=0.001))
    got: asyncio.Queue[dict] = asyncio.Queue()
    left = asyncio.Event()

    async def receive() -> dict:
        await left.wait()
        return {"type": "http.disconnect"}

    scope = {
        "type": "http", "method": "GET", "path": "/ui/events", "raw_path": b"/ui/events", "query_string": b"",
        "root_path": "", "scheme": "http", "http_version": "1.1", "headers": [(b"host", b"localhost")],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "asgi": {"version": "3.0"},
    }  # fmt: skip
    async with asyncio.timeout(PATIENCE_S):
        serving = asyncio.create_task(app(scope, receive, got.put))
        while not (message := await got.get()).get("body"):
            pass
        left.set()
        await serving
    body = message["body"]
    assert body.startswith(b"event: status\ndata: ")
    assert [each.name for each in decoder.decode(body.split(b"data: ", 1)[1]).devices] == ["desk", "mini"]
