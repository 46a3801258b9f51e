"""``primad serve``: its options, checked before anything is measured, loaded or received."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

import typer

from primad.cli.asking import AskingOptions, allowed_hosts, check_asking, cors_origins, warning
from primad.cli.commands import CONFIG_FILE, HelpAll, is_typed, untyped_values
from primad.cli.encoders import bring_projector, is_new, served_projector
from primad.cli.grouped import flags, grouped, names_of, replaced
from primad.cli.hub import library_model, model_path, served_model
from primad.cli.library import ModelFolders, library_of, pinned_in, stored_values, tables_of
from primad.cli.options import (
    DeviceOptions,
    Lora,
    Mmproj,
    NamedDevices,
    OnInterface,
    OwnerOptions,
    RopeOptions,
    check_interface,
    rope_of,
)
from primad.cli.output import daemon_command, err
from primad.cli.progress import RichReporter
from primad.cli.run_options import DraftOptions, RunOptions, SamplingOptions, run_config
from primad.errors import ConfigError, printable
from primad.settings.config import DEFAULT_HTTP_PORT, LOOPBACK, Config, check_host, load_config
from primad.settings.quantities import parse_choice, parse_count

if TYPE_CHECKING:
    from primad.head.model.options import ServeOptions
    from primad.head.serve import LibraryOffer
    from primad.library.library import Library, LibraryModel

MAX_NAME_CHARS: Final = 512
"""The longest model name that a client may send."""
MAX_BACKUP_TOKENS: Final = 4096
MAX_IMAGE_TOKENS: Final = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointOptions:
    """The HTTP server."""

    PANEL: ClassVar[str] = "HTTP server"

    host: Annotated[str, typer.Option(help="Address of the HTTP server.")] = LOOPBACK
    port: Annotated[int, typer.Option(help="Port of the HTTP server.", min=0, max=65_535)] = DEFAULT_HTTP_PORT
    alias: Annotated[
        str | None,
        typer.Option(help="More names of the model for clients, such as A,B.", show_default=False),
    ] = None
    any_model: Annotated[bool, typer.Option("--any-model", help="Serve this model under any name.")] = False
    chat_template: Annotated[
        Path | None,
        typer.Option(help="A file with a Jinja template that replaces the model's.", show_default=False),
    ] = None
    mmproj: Mmproj = Path("auto")
    image_min_tokens: Annotated[
        int | None,
        typer.Option(
            help="Minimum tokens per image, for models that accept any size [default: the encoder's].",
            min=1,
            max=MAX_IMAGE_TOKENS,
            show_default=False,
        ),
    ] = None
    image_max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Maximum tokens per image, for such models.", min=1, max=MAX_IMAGE_TOKENS, show_default=False
        ),
    ] = None
    fetch_images: Annotated[
        bool,
        typer.Option(
            "--fetch-images", help="Download images that clients reference by http or https URL, from public sites."
        ),
    ] = False
    tool_parser: Annotated[
        str,
        typer.Option(
            help="Format of tool calls, if the chat template does not show it: hermes, qwen3-coder, "
            "llama3-json, llama3-pythonic, mistral, gpt-oss, glm, deepseek, deepseek-dsml, gemma, minimax, "
            "minimax-m3, minicpm5, muse, kimi, kimi-k3, phi-4-mini, granite, command-r, nemotron-v2, tool-calls, "
            "apertus, solar, firefunction, gigachat, gigachat3, functionary, functionary-v3-2 or json."
        ),
    ] = "auto"
    context_shift: Annotated[
        bool,
        typer.Option("--context-shift", help="Drop the oldest messages of a conversation that exceeds the context."),
    ] = False
    max_wait: Annotated[
        float | None,
        typer.Option(
            help="Refuse a request that waited this many seconds for others [default: no limit].",
            min=0.1,
            max=86_400,
            show_default=False,
        ),
    ] = None
    embedding: Annotated[
        Path | None,
        typer.Option(
            help="A second model, for embeddings, loaded on this device.",
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherDevicesOptions:
    """How a head finds other devices."""

    PANEL: ClassVar[str] = "Other devices"

    listen: Annotated[
        str | None,
        typer.Option(help="Address for other devices [default: all of this machine].", show_default=False),
    ] = None
    interface: OnInterface = None
    device: NamedDevices = None
    wait: Annotated[int | None, typer.Option(help="Wait for this many other devices.", min=0, show_default=False)] = (
        None
    )
    wait_timeout: Annotated[
        float | None,
        typer.Option(
            help="Give up waiting after this many seconds, for scripts [default: never].",
            min=0.1,
            max=86_400,
            show_default=False,
        ),
    ] = None
    single_device: Annotated[
        bool, typer.Option("--single-device", "--alone", help="Use this device only.", show_default=False)
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptOptions:
    """Recovery of requests when a device is lost."""

    PANEL: ClassVar[str] = "Recovery"

    kv_backup: Annotated[
        str,
        typer.Option(
            help="Replicate the KV cache of requests on a second device, in blocks of this many tokens, or off. auto: "
            "16, if the link has capacity.",
            metavar="auto|off|TOKENS",
        ),
    ] = "auto"
    share_prefixes: Annotated[
        bool,
        typer.Option("--share-prefixes", help="With --kv-cache: share prefixes between API keys."),
    ] = False
    exact_replay_s: Annotated[
        float,
        typer.Option(
            help="Recompute lost tokens one by one, so that the text is identical, if that takes at most this many "
            "seconds; else in chunks, which is faster but may change the text. --batching exact always does.",
            min=0,
            max=86_400,
        ),
    ] = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RingOptions:
    """Timeouts of a ring."""

    PANEL: ClassVar[str] = "Ring"

    step_timeout: Annotated[
        float, typer.Option(help="Seconds after which a late step breaks the ring.", min=1, max=86_400)
    ] = 120.0


SERVE_SHOWN: Final = (
    *("model", "context", "sequences", "draft", "wait", "device", "single_device"),
    *("host", "port", "api_key", "max_ram", "max_vram", "gpu"),
)
"""Options that ``--help`` shows: those that a home needs."""
DEFAULT_KEEP_S: Final = 300.0
OF_ONE_MODEL: Final = ("lora", "alias", "chat_template", "mmproj", "draft", "windows", "rounds")
SERVE_TABLE: Final = {"model", "idle_unload", "lora", "wait", "wait_timeout", "single_device"} | names_of(
    *(EndpointOptions, AskingOptions, RunOptions, DraftOptions, SamplingOptions, RingOptions, RopeOptions, KeptOptions)
)
"""Options allowed in the configuration file, in addition to the keys of the device."""


@grouped
@daemon_command()
def serve(
    called: typer.Context,
    endpoint: EndpointOptions,
    asking: AskingOptions,
    others: OtherDevicesOptions,
    run: RunOptions,
    draft: DraftOptions,
    sampling: SamplingOptions,
    ring: RingOptions,
    rope: RopeOptions,
    kept: KeptOptions,
    device: DeviceOptions,
    owner: OwnerOptions,
    model: Annotated[
        Path | None,
        typer.Option(
            help="A GGUF file, the first part of a split one, or a model by name: one that 'primad models' lists, or "
            "hf:owner/repo:Q4_K_M. Without it all models that 'primad models' lists are offered, and loaded "
            "on request.",
            show_default=False,
        ),
    ] = None,
    models: ModelFolders = None,
    idle_unload: Annotated[
        float,
        typer.Option(
            help="Without --model: unload a model after this many idle seconds; -1: never.",
            min=-1,
            max=31_536_000,
        ),
    ] = DEFAULT_KEEP_S,
    lora: Lora = None,
    help_all: HelpAll = False,
) -> None:
    """Serve a model, or all models on this device, on all paired devices, to any OpenAI client.

    Shows a code; 'primad join --code CODE' on another device pairs the two.

    Examples:

        primad serve --model llama3-70b.gguf

        primad serve --model llama3.2:1b

        primad serve --model hf:Qwen/Qwen3-8B-GGUF:Q4_K_M

        primad serve

        primad serve --models /mnt/models --idle-unload 3600

        primad serve --model llama3-70b.gguf --wait 3 --context 8192

        primad serve --model qwen2.5-7b.gguf --device 192.168.1.20:7770

        primad serve --model qwen2.5-7b.gguf --objective ttft --use-all

        primad serve --model smollm2.gguf --windows 10,12,7 --rounds 1

        primad serve --model llama3-8b.gguf --lora style.gguf --lora facts.gguf=0.5
    """
    del help_all
    check_host(endpoint.host, "--host")
    check_asking(asking, endpoint.host)
    if others.listen is not None:
        check_host(others.listen, "--listen")
    network = {"host": others.listen, "interface": others.interface, "devices": tuple(others.device or ())}
    environment = {
        key: value for key, value in os.environ.items() if key != "PRIMAD_PORT"
    }  # a head has no control port
    given = flags(device, owner) | network | {"models": tuple(models or ())}
    config = load_config(given, environment, called.meta[CONFIG_FILE])
    check_interface(config)
    _check_together(others, run)
    _warn(endpoint, asking, config)
    if model is None:
        _check_for_one(called)
    from primad.head.model.options import is_for_several
    from primad.head.serve import serve as run_serve
    from primad.planning.adapters import parse_lora

    options = _serve_options(config, endpoint, asking, others, run, draft, ring, rope, kept)
    options = replace(options, lora=parse_lora(lora or ()), sampling=_given(sampling))
    if endpoint.embedding is not None and (other := library_model(endpoint.embedding, lambda: config)) is not None:
        options = replace(options, embedding=other.files[0], embedding_name=other.name)
    reporter = RichReporter(err)
    if model is None:
        from primad.head.serve import serve_library

        groups = (endpoint, asking, others, run, draft, ring, rope, kept)
        offer = _offer(called, config, groups, sampling, lora or (), idle_unload)
        try:
            serve_library(config, offer, options, endpoint.host, reporter)
        finally:
            reporter.resolve()
        return
    found = library_model(model, lambda: config)
    if found is not None:
        known = dict.fromkeys((*options.aliases, model.as_posix(), found.name.removesuffix(":latest")))
        known.pop(found.name, None)
        options = replace(options, name=found.name, aliases=tuple(known))
    whole = others.single_device or others.wait == 0 or bool(lora) or options.run.parallel == "tensor"
    file = model if found is None else found.files[0]
    new = is_new(file, config)
    source = served_model(file, config, whole=whole, several=is_for_several(options, config))
    first = source if isinstance(source, Path) else source.parts[0]
    options = replace(options, projector=served_projector(options.mmproj, model, first, found, config, new=new))
    try:
        run_serve(config, source, options, endpoint.host, reporter)
    finally:
        reporter.resolve()  # restore the terminal's cursor in any case


def _offer(
    called: typer.Context,
    config: Config,
    groups: tuple[Any, ...],
    sampling: SamplingOptions,
    lora: Sequence[str],
    keep_s: float,
) -> LibraryOffer:
    """The models of this device, each with the typed options, and otherwise with its settings in ``models.toml``."""
    from primad.head.serve import LibraryOffer
    from primad.planning.adapters import parse_lora

    def options_of(found: LibraryModel, library: Library) -> ServeOptions:
        values = untyped_values(called, tables_of(found, library, config))
        own = _serve_options(config, *(replaced(each, values) for each in groups))
        adapters = parse_lora(values.get("lora") or lora)
        given = _given(replaced(sampling, values))
        return replace(own, lora=adapters, sampling=given, projector=found.projector)

    def bring(found: LibraryModel, library: Library, report_line: Callable[[str], None]) -> None:
        if found.projector is None:
            bring_projector(options_of(found, library).mmproj, found.files[0], config, report_line)

    def pinned(library: Library) -> frozenset[str]:
        found = pinned_in(library, config)
        for key in (key for key, model in found.items() if model is None):
            err.print(f"{printable(key)} in models.toml is to stay loaded, but matches no model that can be used here")
        return frozenset(model.name for model in found.values() if model is not None)

    typed = str(called.params["mmproj"]) if is_typed(called, "mmproj") else None
    return LibraryOffer(
        read=lambda: _as_served(library_of(config), config, typed),
        options_of=options_of,
        bring=bring,
        pinned=pinned,
        keep_s=keep_s,
    )


def _as_served(library: Library, config: Config, typed: str | None) -> Library:
    """Return ``library``, whose models see and hear as they will with ``--mmproj``, ``typed`` or in ``models.toml``."""
    from primad.head.model.encoder import AUTO, encoder_file

    wishes = {} if typed is not None else stored_values("mmproj", library, config)

    def as_served(model: LibraryModel) -> LibraryModel:
        wish = Path(str(wishes.get(model.name, typed or AUTO)))
        if wish == AUTO:
            return model
        try:
            found, _ = encoder_file(wish, model.files[0], model.projector)
        except ConfigError:  # reported when the model is loaded
            return replace(model, sees=False, hears=False)
        return replace(model, sees=found.sees, hears=found.hears)

    return replace(library, models=tuple(map(as_served, library.models)))


def _check_for_one(called: typer.Context) -> None:
    """Check that options of a single model are not typed without ``--model``. Raises ``ConfigError``."""
    for name in OF_ONE_MODEL:
        is_for_all = name == "mmproj" and str(called.params[name]) in ("auto", "none")
        if called.params.get(name) and is_typed(called, name) and not is_for_all:
            raise ConfigError(
                f"--{name.replace('_', '-')}: is for one model; add --model, or write it into models.toml for a model"
            )


def _check_together(others: OtherDevicesOptions, run: RunOptions) -> None:
    if others.single_device and (others.wait or others.device):
        raise ConfigError("--single-device, --alone: contradicts --wait and --device; leave one of them out")
    if run.use_all and others.single_device:
        raise ConfigError("--use-all: contradicts --single-device and --windows; leave one of them out")


def _warn(endpoint: EndpointOptions, asking: AskingOptions, config: Config) -> None:
    line = warning(asking, endpoint.host)
    if line is not None:
        err.print(f"warning: {line}")
    if config.pause_on_battery:
        err.print("pause_on_battery: has no effect on the head, without which nothing is served")


def _serve_options(
    config: Config,
    endpoint: EndpointOptions,
    asking: AskingOptions,
    others: OtherDevicesOptions,
    run: RunOptions,
    draft: DraftOptions,
    ring: RingOptions,
    rope: RopeOptions,
    kept: KeptOptions,
) -> ServeOptions:
    from primad.api.answering.reading import PARSERS
    from primad.head.model.options import ServeOptions
    from primad.head.model.vocabulary import chat_template_in

    return ServeOptions(
        kv_backup=_backup(kept.kv_backup),
        share_prefixes=kept.share_prefixes,
        exact_replay_s=kept.exact_replay_s,
        wait=others.wait,
        wait_timeout_s=others.wait_timeout,
        step_timeout_s=ring.step_timeout,
        http_host=endpoint.host,
        http_port=endpoint.port,
        single_device=others.single_device,
        run=run_config(run, draft),
        draft=_draft_path(draft.draft, config),
        aliases=() if endpoint.alias is None else _aliases(endpoint.alias),
        any_model=endpoint.any_model,
        context_shift=endpoint.context_shift,
        max_wait_s=endpoint.max_wait,
        chat_template=None if endpoint.chat_template is None else chat_template_in(endpoint.chat_template),
        tool_parser=parse_choice(endpoint.tool_parser, PARSERS, "--tool-parser"),
        embedding=endpoint.embedding,
        mmproj=endpoint.mmproj,
        image_tokens=image_tokens(endpoint),
        fetch_images=endpoint.fetch_images,
        allowed_hosts=allowed_hosts(asking.allow_host),
        cors_origins=cors_origins(asking),
        api_key=asking.api_key,
        api_key_file=asking.api_key_file,
        no_auth=asking.no_auth,
        rope=rope_of(rope),
    )


def image_tokens(endpoint: EndpointOptions) -> tuple[int, int]:
    """Minimum and maximum tokens per picture; 0 for the encoder's own."""
    minimum, maximum = endpoint.image_min_tokens or 0, endpoint.image_max_tokens or 0
    if maximum and minimum > maximum:
        raise ConfigError(f"--image-min-tokens {minimum}: is more than --image-max-tokens {maximum}")
    return minimum, maximum


def _draft_path(given: Path | None, config: Config) -> Path | None:
    from primad.planning.draft_model import AUTO

    return given if given is None or given == AUTO else model_path(given, lambda: config)


def _given(sampling: SamplingOptions) -> dict[str, float]:
    return {name: value for name, value in flags(sampling).items() if value is not None}


def _backup(text: str) -> int | None:
    """Tokens per block, 0 for off and None for auto."""
    return 0 if text == "off" else parse_count(text, MAX_BACKUP_TOKENS, "--kv-backup")


def _aliases(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or max(map(len, names)) > MAX_NAME_CHARS:
        raise ConfigError(
            f"--alias {printable(text)}: give names of 1 to {MAX_NAME_CHARS} characters separated by commas"
        )
    return tuple(dict.fromkeys(names))
