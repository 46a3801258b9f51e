"""Starts and stops a head: checks options first, then runs its HTTP server and its daemon in one task group."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from socket import socket
from typing import Any, Final

from primad.api.answering.backend import Health, ModelNames
from primad.api.answering.models import ModelState, OfferedModel
from primad.api.app import Api, create_app
from primad.api.http.access import OF_THIS_MACHINE, OPEN, Admission, Door
from primad.api.http.key_file import KeyFile
from primad.api.http.keys import ApiKey, digest_of, new_key
from primad.api.http.server import HTTP_GRACE_S, bind_http, http_server, local_url
from primad.daemon.embedding import EmbeddingService
from primad.daemon.measuring import OwnProfile
from primad.daemon.node import Node
from primad.daemon.reporter import Reporter
from primad.daemon.run import own_node, run
from primad.errors import ConfigError
from primad.gguf.model import open_model
from primad.gguf.ranged import RangedModel
from primad.head.daemon import HeadDaemon
from primad.head.model.checked import CheckedModel, check_model
from primad.head.model.options import ServeOptions
from primad.head.model.text_service import TextService
from primad.head.model.vocabulary import facts_of
from primad.head.offer.models import HeadModels, OfferSettings
from primad.head.offer.offered_library import OfferedLibrary
from primad.head.offer.opening import ModelOpening
from primad.head.offer.without_model import WithoutModel
from primad.head.rings.backend import RingBackend
from primad.head.rings.status import page_line
from primad.library.library import Library, LibraryModel
from primad.library.pulling import HubDownloads
from primad.network.local_heads import announced_head
from primad.network.own_places import own_names
from primad.settings.config import Config, models_folder
from primad.settings.quantities import show_bytes, show_count
from primad.system.memory import memory
from primad.system.niceness import apply_nice
from primad.system.processors import usable_cores

EMBEDDING_NICE: Final = 10
"""Embeddings yield to a request's next token."""
OWN_COMMANDS: Final = "--own-commands"
"""The name of the key for this user's commands; no name in a key file starts like that."""


def check_embedding(path: Path) -> None:
    """Raises ``ModelError`` if ``path`` is not a model, ``ConfigError`` if this device has no room for it."""
    needed, free = facts_of(open_model(path)).size_bytes or 0, memory().available_bytes
    if needed > free:
        raise ConfigError(
            f"--embedding {path}: has {show_bytes(needed)} of weights, and {show_bytes(free)} of memory are free here; "
            "choose a smaller model"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryOffer:
    """The models of ``serve`` without ``--model``: those that ``read`` finds, with the options that ``options_of``
    returns.

    ``bring`` fetches what a model lacks before it is loaded, and reports it in a line. ``pinned`` models stay loaded,
    others until they are unused for ``keep_s`` (negative: for ever).
    """

    read: Callable[[], Library]
    options_of: Callable[[LibraryModel, Library], ServeOptions]
    bring: Callable[[LibraryModel, Library, Callable[[str], None]], None]
    pinned: Callable[[Library], frozenset[str]]
    keep_s: float


def serve(
    config: Config, source: Path | RangedModel, options: ServeOptions, http_host: str, reporter: Reporter
) -> None:
    """Run the head with one model until it is stopped. Whatever needs no network is checked first."""
    checked = check_model(config, source, options, reporter)
    if options.embedding is not None:
        check_embedding(options.embedding)
    with _opened(config, checked.options, http_host) as place:

        async def main() -> None:
            service = replace(checked, options=place.options).service(place.node)
            texts = TextService(str(service.model.file), checked.template)
            backend = RingBackend(texts=texts, max_wait_s=options.max_wait_s)
            profile = OwnProfile(config, reporter, backend.describe)
            head = HeadDaemon(place.node, place.options, profile=profile, reporter=reporter)
            head.only(service, backend)
            embedding = _embedding_of(options, config)
            app = create_app(
                backend,
                admission=place.admission,
                timings=place.node.timings.api,
                names=ModelNames(aliases=options.aliases, any_model=options.any_model),
                embeddings=embedding,
                admin_api=head.admin_api,
            )
            try:
                await _conduct(place, head, app, _run(head, embedding, reporter), backend.fail)
            finally:
                await texts.close()

        run(main())


def serve_library(
    config: Config, offer: LibraryOffer, options: ServeOptions, http_host: str, reporter: Reporter
) -> None:
    """Run the head until it is stopped; a model of ``offer`` is loaded when a request names it."""
    if options.embedding is not None:
        check_embedding(options.embedding)
    offered = OfferedLibrary(offer.read, reporter.report_line)
    pinned = offer.pinned(offered.read())
    with _opened(config, options, http_host) as place:

        def check(model: LibraryModel) -> CheckedModel:
            own = replace(
                offer.options_of(model, offered.found),
                name=model.name,
                http_port=place.options.http_port,
                is_only=False,
            )
            return check_model(config, model.files[0], own, reporter)

        async def main() -> None:
            node, texts = place.node, TextService("", None)

            def describe(what: str) -> None:
                head.describe(what)

            profile = OwnProfile(config, reporter, describe)
            head = HeadDaemon(node, place.options, profile=profile, reporter=reporter)

            def health() -> Health:
                found = head.health()
                return replace(found, detail=models.summary) if head.is_ready else found

            without = WithoutModel(texts, health, lambda: {"cluster": head.cluster, "events": []})
            opening = ModelOpening(
                head,
                without,
                check=check,
                embedder=lambda model: _embedder(model.files[0], model.name, config),
                bring=lambda model: offer.bring(model, offered.found, reporter.report_line),
                max_wait_s=options.max_wait_s,
            )
            settings = OfferSettings(keep_s=offer.keep_s, pinned=pinned, max_wait_s=options.max_wait_s)
            downloads = HubDownloads(models_folder(config.home), offer.read)
            models = HeadModels(offered, opening, downloads, settings, reporter.report_line)
            head.about = models.about
            embedding = _embedding_of(options, config)
            app = create_app(
                without,
                admission=place.admission,
                timings=node.timings.api,
                names=ModelNames(any_model=options.any_model),
                embeddings=embedding,
                admin_api=head.admin_api,
                models=models,
            )

            async def offering() -> None:
                texts.begin()  # parses every request for a model that is not loaded
                await models.begin()
                reporter.report_line(offered_line(models.offered(), place.options.url))
                reporter.report_line(page_line(place.options.url))
                await _run(head, embedding, reporter)

            try:
                await _conduct(place, head, app, offering(), models.stop)
            finally:
                await downloads.close()
                await models.close()
                await texts.close()

        run(main())


def offered_line(offered: Sequence[OfferedModel], url: str) -> str:
    """Return the line that tells the owner how many models there are, and where."""
    usable = sum(each.state is not ModelState.FAILED for each in offered)
    if not usable:
        return f"no model is here to offer at {url}/v1; 'primad pull' fetches one, --models names a folder"
    are = "is" if usable == 1 else "are"
    return f"{show_count(usable, 'model')} {are} offered at {url}/v1, and loaded when a request names one"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a head listens, and which clients it admits."""

    node: Node
    listener: socket
    options: ServeOptions
    admission: Admission


@contextlib.contextmanager
def _opened(config: Config, options: ServeOptions, http_host: str) -> Iterator[_Place]:
    own_key = new_key()
    admission = Admission(
        door=door_of(options, own_key),
        hosts=(http_host, *own_names(), *options.allowed_hosts),
        origins=options.cors_origins,
        owner_key=own_key,
    )
    with (
        own_node(config) as node,
        contextlib.closing(bind_http(http_host, options.http_port)) as listener,
    ):
        options = replace(options, http_port=listener.getsockname()[1])
        here = local_url(http_host, options.http_port)
        with announced_head(config.home, config.name, here, options.http_port, own_key):
            yield _Place(node=node, listener=listener, options=options, admission=admission)


async def _conduct(
    place: _Place,
    head: HeadDaemon,
    app: Api,
    work: Coroutine[Any, Any, None],
    fail: Callable[[str], None],
) -> None:
    """Serve ``app`` until ``work``, which runs ``head``, ends; then have open requests ``fail``."""
    async with asyncio.TaskGroup() as group:
        head.app, http = app, http_server(app, place.node.timings.api, app.state.checks, app.state.close)
        serving = group.create_task(http.serve(sockets=[place.listener]))
        heading = asyncio.create_task(work)
        try:
            await asyncio.wait([heading])
        finally:
            # Open requests end with an error now, so that the server does not wait for them.
            fail("primad is stopping")
            http.should_exit = True
            heading.cancel()
            await asyncio.wait([serving], timeout=HTTP_GRACE_S)
            await asyncio.wait([heading])
        heading.result()


def _embedding_of(options: ServeOptions, config: Config) -> EmbeddingService | None:
    path, name = options.embedding, options.embedding_id
    return None if path is None or name is None else _embedder(path, name, config)


def _embedder(path: Path, name: str, config: Config) -> EmbeddingService:
    return EmbeddingService(
        path,
        name,
        threads=config.threads or usable_cores(),
        began=lambda pid: apply_nice(pid, max(config.nice, EMBEDDING_NICE)),
    )


async def _run(head: HeadDaemon, embedding: EmbeddingService | None, reporter: Reporter) -> None:
    """Start ``embedding``, then run the head, so that its plan counts the memory used; end both."""
    try:
        if embedding is not None:
            ready = await embedding.start()
            reporter.report_line(
                f"{embedding.name} serves embeddings of {ready.width} numbers for texts of at most "
                f"{ready.max_text_tokens} tokens; its process uses {show_bytes(ready.bytes)}"
            )
        await head.run()
    finally:
        if embedding is not None:
            await embedding.close()


def door_of(options: ServeOptions, own_key: str) -> Door:
    """Return the access rule. Without keys it admits every client that reaches the server (``--no-auth``), or programs
    of this machine; with keys it admits their holders and ``own_key``. Raises ``ConfigError``."""
    if options.api_key is None and options.api_key_file is None:
        return OPEN if options.no_auth else OF_THIS_MACHINE
    given = {OWN_COMMANDS: own_key} | ({} if options.api_key is None else {"--api-key": options.api_key})
    always = tuple(ApiKey(name=name, digest=digest_of(key)) for name, key in given.items())
    if options.api_key_file is None:
        return Door(lambda: always)
    file = KeyFile(options.api_key_file)
    return Door(lambda: (*always, *file.keys()))
