"""Starts and stops a head: checks options first, then runs its HTTP server and its daemon in one task group."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Final

from primad.api.answering.backend import ModelNames
from primad.api.app import Api, create_app
from primad.api.http.access import OF_THIS_MACHINE, OPEN, Admission, Door
from primad.api.http.key_file import KeyFile
from primad.api.http.keys import ApiKey, digest_of, new_key
from primad.api.http.server import HTTP_GRACE_S, bind_http, http_server, local_url
from primad.daemon.embedding import EmbeddingService
from primad.daemon.measuring import OwnProfile
from primad.daemon.reporter import Reporter
from primad.daemon.run import own_node, run
from primad.errors import ConfigError
from primad.gguf.model import open_model
from primad.gguf.ranged import RangedModel
from primad.head.admin_api import HeadAdminApi
from primad.head.daemon import HeadDaemon
from primad.head.model.checked import check_model
from primad.head.model.options import ServeOptions
from primad.head.model.text_service import TextService
from primad.head.model.vocabulary import facts_of
from primad.head.rings.backend import RingBackend
from primad.network.local_heads import announced_head
from primad.network.own_places import own_names
from primad.settings.config import Config
from primad.settings.quantities import show_bytes
from primad.settings.timings import ApiTimings
from primad.system.memory import memory
from primad.system.niceness import apply_nice
from primad.system.processors import usable_cores

EMBEDDING_NICE: Final = 10
"""A request's next token precedes embeddings."""
OWN_COMMANDS: Final = "--own-commands"
"""The name of the key of this user's commands; no name in a key file starts like that."""


def check_embedding(path: Path) -> None:
    """Raises ``ModelError`` if ``path`` is not a model, ``ConfigError`` if this device has no room for it."""
    needed, free = facts_of(open_model(path)).size_bytes or 0, memory().available_bytes
    if needed > free:
        raise ConfigError(
            f"--embedding {path}: has {show_bytes(needed)} of weights, and {show_bytes(free)} of memory are free here; "
            "choose a smaller model"
        )


def serve(
    config: Config, source: Path | RangedModel, options: ServeOptions, http_host: str, reporter: Reporter
) -> None:
    """Run the head until it is stopped. Everything that needs no network is checked first."""
    checked = check_model(config, source, options, reporter)
    if options.embedding is not None:
        check_embedding(options.embedding)
    own_key = new_key()
    admission = Admission(
        door=door_of(options, own_key),
        hosts=(http_host, *own_names(), *options.allowed_hosts),
        origins=options.cors_origins,
        owner_key=own_key,
    )
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(own_node(config))
        listener = stack.enter_context(contextlib.closing(bind_http(http_host, options.http_port)))
        checked = replace(checked, options=replace(checked.options, http_port=listener.getsockname()[1]))
        options = checked.options
        here = local_url(http_host, options.http_port)
        stack.enter_context(announced_head(config.home, config.name, here, options.http_port, own_key))

        async def main() -> None:
            service = checked.service(node)
            texts = TextService(str(service.model.file), checked.template)
            backend = RingBackend(texts=texts, max_wait_s=options.max_wait_s)
            embedding = _embedding_of(options, config)
            profile = OwnProfile(config, reporter, backend.describe, reserved_bytes=checked.reserved_bytes)
            head = HeadDaemon(node, options, profile=profile, reporter=reporter)
            head.only(service, backend)
            async with asyncio.TaskGroup() as group:
                app = _app(backend, options, admission, node.timings.api, embedding, head.admin_api)
                head.app, http = app, http_server(app, node.timings.api, app.state.checks, app.state.close)
                serving = group.create_task(http.serve(sockets=[listener]))
                heading = asyncio.create_task(_run(head, embedding, reporter))
                try:
                    await asyncio.wait([heading])
                finally:
                    # Open requests end with an error now, and the server need not wait for them.
                    backend.fail("primad is stopping")
                    http.should_exit = True
                    heading.cancel()
                    await asyncio.wait([serving], timeout=HTTP_GRACE_S)
                    await asyncio.wait([heading])
                    await texts.close()
                heading.result()

        run(main())


def _embedding_of(options: ServeOptions, config: Config) -> EmbeddingService | None:
    path, name = options.embedding, options.embedding_id
    if path is None or name is None:
        return None
    return EmbeddingService(
        path,
        name,
        threads=config.threads or usable_cores(),
        began=lambda pid: apply_nice(pid, max(config.nice, EMBEDDING_NICE)),
    )


async def _run(head: HeadDaemon, embedding: EmbeddingService | None, reporter: Reporter) -> None:
    """Run the head after ``embedding`` has started, so that its plan sees the used memory, and end both."""
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
    """The access rule: without keys everybody who reaches the server (``--no-auth``), or programs of this machine; with
    keys their holders, or ``own_key``. Raises ``ConfigError``."""
    if options.api_key is None and options.api_key_file is None:
        return OPEN if options.no_auth else OF_THIS_MACHINE
    given = {OWN_COMMANDS: own_key} | ({} if options.api_key is None else {"--api-key": options.api_key})
    always = tuple(ApiKey(name=name, digest=digest_of(key)) for name, key in given.items())
    if options.api_key_file is None:
        return Door(lambda: always)
    file = KeyFile(options.api_key_file)
    return Door(lambda: (*always, *file.keys()))


def _app(
    backend: RingBackend,
    options: ServeOptions,
    admission: Admission,
    timings: ApiTimings,
    embeddings: EmbeddingService | None,
    admin_api: HeadAdminApi,
) -> Api:
    names = ModelNames(aliases=options.aliases, any_model=options.any_model)
    return create_app(
        backend, admission=admission, timings=timings, names=names, embeddings=embeddings, admin_api=admin_api
    )
