"""``primad page``: the page of a running head, opened by its owner."""

from __future__ import annotations

import webbrowser
from typing import Annotated

import typer

from primad.cli.endpoint import HeadName, Key, Url, check_let_in, connected, reached
from primad.cli.output import out
from primad.errors import ClusterError

ANSWER_TIMEOUT_S = 5.0


def page(
    url: Url = None,
    head: HeadName = None,
    api_key: Key = None,
    show: Annotated[bool, typer.Option("--print", help="Print the address instead of opening a browser.")] = False,
) -> None:
    """Open the page of a running head in the browser, with the rights of its owner.

    The printed address works once, within a minute. Without it the page cannot change anything.

    Examples:

        primad page

        primad page --print
    """
    there = reached(url, head, api_key)
    with connected(there, ANSWER_TIMEOUT_S) as client:
        response = client.post("/ui/ticket", json={})
        check_let_in(there.url, response.status_code)
        if response.status_code == 403:
            address = there.url
            out.print("only the head's owner can change things on its page; this is the page for others")
        elif response.status_code == 200:
            address = f"{there.url}/#ticket={response.json()['ticket']}"
        else:
            raise ClusterError(f"{there.url}: returned {response.status_code}; is it a head of this version?")
    out.print(address, soft_wrap=True)
    if not show and not webbrowser.open(address):
        out.print("cannot open a browser here; open the address in one")
