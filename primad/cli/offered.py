"""The models that a running head offers, for the commands that ask for them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from primad.cli.endpoint import Reached, check_let_in, connected, error_in
from primad.errors import ClusterError, printable
from primad.library.names import meant
from primad.settings.quantities import show_expiry, show_progress

if TYPE_CHECKING:
    import httpx

ANSWER_TIMEOUT_S: Final = 15.0


class HeadModel(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of ``/v1/models``; ``status`` is missing where the head serves one model permanently."""

    id: str
    aliases: tuple[str, ...] = ()
    max_model_len: int | None = None
    meta: dict[str, Any] = {}
    status: dict[str, Any] | None = None
    architecture: dict[str, Any] = {}

    @property
    def takes(self) -> tuple[bool, bool]:
        """Whether it accepts images, and sound."""
        found = self.architecture.get("input_modalities") or ()
        return "image" in found, "audio" in found

    @property
    def state(self) -> str:
        """unloaded, loading, loaded, unloading or failed."""
        status = self.status or {}
        return "failed" if status.get("failed") else str(status.get("value", "loaded"))

    @property
    def line(self) -> str:
        """Its state for people."""
        status = self.status or {}
        parts = [self.state, *show_progress(status.get("progress"), status.get("expected_s"))]
        if isinstance(expires := status.get("expires_at"), int | float) and self.state == "loaded":
            parts.append(show_expiry(expires - time.time()))
        if self.state == "failed" and status.get("detail"):
            parts.append(printable(str(status["detail"]), 200))
        return ", ".join(parts)


class _Listed(msgspec.Struct):
    data: list[HeadModel]


def offered_models(client: httpx.Client, there: Reached) -> list[HeadModel]:
    """All models of the head. Raises ``ClusterError``."""
    answer = client.get("/v1/models")
    check_let_in(there.url, answer.status_code)
    try:
        return msgspec.json.decode(answer.content, type=_Listed).data
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise ClusterError(f"{there.url}: {error_in(answer)}") from exc


def offered_model(name: str, models: list[HeadModel]) -> HeadModel | None:
    """The model that ``name`` means; None if it matches none or several."""
    found = meant(name, [(each.id, *each.aliases) for each in models])
    return models[found[0]] if len(found) == 1 else None


def states_here(home: Path) -> list[HeadModel]:
    """The models of the head that runs in ``home``; none if none runs. Raises ``ClusterError``."""
    from primad.network.local_heads import home_note, read_head

    found = read_head(home_note(home))
    if found is None:
        return []
    there = Reached(url=found.url, key=found.key or None)
    with connected(there, ANSWER_TIMEOUT_S) as client:
        return offered_models(client, there)
