"""``primad page`` against the app under uvicorn: the owner gets a ticket, others the plain address."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from primad.api.http.access import Admission
from primad.cli import page as page_command
from tests.fakes.backend import FakeBackend, replies
from tests.fakes.http import served_in_thread

OWNER = "the-owner's-key-is-long"


@pytest.fixture
def url() -> Iterator[str]:
    with served_in_thread(FakeBackend(replies("Hi")), admission=Admission(owner_key=OWNER)) as url:
        yield url


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """The addresses that were opened in a browser."""
    found: list[str] = []
    monkeypatch.setattr(page_command.webbrowser, "open", lambda address: bool(found.append(address) or True))
    return found


def test_the_address_of_the_owner_lets_in_once(command, url, opened):
    code, out, err = command("page", "--url", url, "--api-key", OWNER)
    assert (code, err) == (0, "")
    (address,) = opened
    assert out.strip() == address
    assert OWNER not in address
    _, _, ticket = address.partition("/#ticket=")
    assert httpx.post(f"{url}/ui/owner", json={"ticket": ticket}, trust_env=False).json() == {"key": OWNER}


def test_others_get_the_page_as_it_is_for_all(command, url, opened):
    code, out, _ = command("page", "--url", url, "--print")
    assert code == 0
    assert out.splitlines()[-1] == url
    assert "only the head's owner" in out
    assert not opened


def test_an_unreachable_head_opens_no_page(command, opened):
    code, _, err = command("page", "--url", "http://127.0.0.1:9")
    assert code == 2
    assert "is 'primad serve' running?" in err
    assert not opened
