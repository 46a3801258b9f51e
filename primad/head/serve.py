"""Starts and stops a head: checks options first, then runs its HTTP server and its daemon in one task group."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Final

from halda import ModelProfile
from primad.api.answering.backend import ModelNames
from primad.api.app import Api, create_app
from primad.api.http.access import OF_THIS_MACHINE, OPEN, Admission, Door
from primad.api.http.key_file import KeyFile
from primad.api.http.keys import ApiKey, digest_of, new_key
from primad.api.http.server import HTTP_GRACE_S, bind_http, http_server, local_url
from primad.certify.first import certified, warning
from primad.certify.verdict import load_verdict, with_verdict
from primad.daemon.embedding import EmbeddingService
from primad.daemon.measuring import OwnProfile
from primad.daemon.reporter import Reporter
from primad.daemon.run import own_node, run
from primad.errors import ConfigError
from primad.gguf.architectures.cuts import cuttable, why_whole
from primad.gguf.architectures.table import ADVICE, NotCutError
from primad.gguf.header import Header
from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.gguf.ranged import RangedModel
from primad.head.admin_api import HeadAdminApi
from primad.head.daemon import HeadDaemon
from primad.head.model.options import ServeOptions, is_for_several
from primad.head.model.service import service_of
from primad.head.model.text_service import TextService
from primad.head.model.vocabulary import chat_template_of, facts_of
from primad.head.rings.backend import RingBackend
from primad.network.local_heads import announced_head
from primad.network.own_places import own_names
from primad.planning.adapters import check_adapters, open_adapters, with_adapters, with_rope
from primad.planning.check_run import check_run
from primad.planning.draft_model import AUTO, MAX_CONTEXT, choose_draft, draft_model, models_here, no_room_here
from primad.planning.predicting import predicts, with_predicting
from primad.ring.speculation.messages import DraftModel
from primad.settings.config import Config, models_folder
from primad.settings.quantities import show_bytes
from primad.settings.timings import ApiTimings
from primad.system.memory import memory
from primad.system.niceness import apply_nice
from primad.system.processors import usable_cores

EMBEDDING_NICE: Final = 10
"""A request's next token precedes embeddings."""
OWN_COMMANDS: Final = "--own-commands"
"""The name of the key of this user's commands; no name in a key file starts like that."""
NO_TEMPLATE: Final = (
    "the model file has no chat template, so the model may not be made for chat; messages are formatted as ChatML, "
    "or with --chat-template FILE"
)


def template_of(given: str | None, header: Header, reporter: Reporter) -> str | None:
    """The chat template: the ``given`` one, the file's, or None, which is ChatML. The owner is warned of that: a model
    that does not know it emits its own marks, which would look like a fault of the server."""
    template = given or chat_template_of(header)
    if template is None:
        reporter.report_line(NO_TEMPLATE)
    return template


def check_options(options: ServeOptions, config: Config, header: Header, model: ModelProfile) -> None:
    """Check everything that can be checked without the network. Raises ``ConfigError``, ``PlanError``,
    ``ModelError``."""
    check_run(options.run, model, options.draft)
    if is_for_several(options, config):
        cuttable(header)


def as_it_can_be(
    options: ServeOptions, config: Config, header: Header, reporter: Reporter, why_not: str = ""
) -> ServeOptions:
    """``options``, with this device alone for a model that cannot be cut, if no other devices were requested.

    ``why_not`` is the reason why a model is not certified. Raises ``NotCutError`` if other devices were requested.
    """
    is_asked = is_for_several(options, config)
    if why_not and is_asked:
        raise NotCutError(f"{header.path}: {why_not}", ADVICE)
    if options.single_device or is_asked:
        return options
    if reason := why_not or why_whole(header):
        reporter.report_line(f"{reason}; this device serves it alone")
        return replace(options, single_device=True)
    return options


def draft_of(
    options: ServeOptions, config: Config, header: Header, reporter: Reporter, free_bytes: int
) -> tuple[DraftModel | None, bool]:
    """The draft model, if there is one, and whether it fits ``free_bytes`` of free memory here.

    Raises ``ConfigError`` if it cannot draft, or must run here and has no room.
    """
    path, is_here = options.draft, options.single_device or options.run.draft_on == config.name
    if path == AUTO:
        paths = models_here(header, models_folder(config.home))
        found = choose_draft(header, paths, context=MAX_CONTEXT, free_bytes=free_bytes)
        if found.path is None and not is_here:
            found = choose_draft(header, paths, context=MAX_CONTEXT, free_bytes=None)
        reporter.report_line(f"--draft auto: {found}")
        path = found.path
    if path is None:
        return None, True
    model = draft_model(path, header, context=MAX_CONTEXT, threads=config.threads)
    has_room = model.memory_bytes <= free_bytes
    if not has_room:
        if is_here or why_whole(open_model(path)):
            raise ConfigError(f"{no_room_here(model, free_bytes)}; choose a smaller model")
        reporter.report_line(f"{no_room_here(model, free_bytes)}: it runs on a device that has room")
    return model, has_room


def _why_not_itself(options: ServeOptions, ranged: RangedModel | None) -> str:
    """What keeps a model from drafting with its own layers; empty for nothing."""
    if options.draft is not None:
        return "--draft names another model that drafts"
    if options.lora:
        return "adapters change the model, but not what its layer for that makes of it"
    return "" if ranged is None else "the model's file is not here; primad pull fetches it"


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
    ranged = source if isinstance(source, RangedModel) else None
    header = open_model(source) if isinstance(source, Path) else source.header
    adapters = open_adapters(options.lora, header)
    header, why_not = (header, "") if options.single_device else certified(header, config.home, reporter.report_line)
    options = as_it_can_be(options, config, header, reporter, why_not)
    verdict = load_verdict(config.home, header)
    warned = "" if options.single_device else warning(header, verdict)
    if warned:
        reporter.report_line(warned)
    template = template_of(options.chat_template, header, reporter)
    model = with_adapters(with_verdict(model_profile(header), header, verdict), adapters)
    model = with_rope(model, header, options.rope)
    check_options(options, config, header, model)
    check_adapters(adapters, several=is_for_several(options, config))
    if options.embedding is not None:
        check_embedding(options.embedding)
    drafts_itself = predicts(options.run, header, _why_not_itself(options, ranged), free_bytes=memory().available_bytes)
    if drafts_itself:
        model = with_predicting(model, header)
    draft, has_room = draft_of(options, config, header, reporter, memory().available_bytes)
    reserved_bytes = 0 if draft is None or not has_room else draft.memory_bytes
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
        options = replace(options, http_port=listener.getsockname()[1])
        here = local_url(http_host, options.http_port)
        stack.enter_context(announced_head(config.home, config.name, here, options.http_port, own_key))

        async def main() -> None:
            service = service_of(
                node, header, model, options, ranged, draft, adapters, head_has_room=has_room, predicts=drafts_itself
            )
            texts = TextService(str(service.model.file), template)
            backend = RingBackend(texts=texts, max_wait_s=options.max_wait_s)
            embedding = _embedding_of(options, config)
            profile = OwnProfile(config, reporter, backend.describe, reserved_bytes=reserved_bytes)
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
