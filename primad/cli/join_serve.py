"""``primad join`` and ``primad serve``: their options, judged before anything is measured, loaded or heard."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from primad.cli.options import (
    Cluster,
    Home,
    KvCacheType,
    Lock,
    MaxDisk,
    MaxRam,
    MaxVram,
    Name,
    NamedDevices,
    Nice,
    OnInterface,
    Threads,
)
from primad.cli.progress import RichReporter
from primad.errors import ConfigError
from primad.settings.config import (
    DEFAULT_HTTP_PORT,
    LOOPBACK,
    Config,
    check_address,
    check_host,
    is_loopback,
    load_config,
)

_err = Console(stderr=True, highlight=False, soft_wrap=True)


def join(
    home: Home = None,
    name: Name = None,
    cluster: Cluster = None,
    code: Annotated[
        str | None, typer.Option(help="The code that the head shows, the first time.", show_default=False)
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="With --code: host:port that the head shows beside it, where multicast is blocked.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on [default: all of this machine].", show_default=False)
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Control port [default: 7770, or any when it is taken].", show_default=False)
    ] = None,
    interface: OnInterface = None,
    threads: Threads = None,
    nice: Nice = None,
    lock: Lock = None,
    max_ram: MaxRam = None,
    max_vram: MaxVram = None,
    max_disk: MaxDisk = None,
    pause_on_battery: Annotated[
        bool | None,
        typer.Option(
            "--pause-on-battery/--no-pause-on-battery",
            help="Compute nothing while this device runs on battery.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Lend this device to a head: announce it, wait for work, serve until stopped.

    The first time with the code that 'primad serve' or 'primad pair' shows on the head; from then on they know each other.

    Examples:

        primad join --code 7-lamp-river

        primad join

        primad join --max-ram 8GB --max-disk 40GB --nice 10 --pause-on-battery

        primad join --home /tmp/second --name second --port 7781 --host 127.0.0.1
    """
    if code is not None:
        from primad.trust.words import parse_code

        parse_code(code)
    if device is not None:
        if code is None:
            raise ConfigError(f"--device {device}: says where to pair; give the head's --code too, or leave it out")
        check_address(device, "--device")
    config = load_config(
        {
            "home": home,
            "name": name,
            "cluster": cluster,
            "host": host,
            "port": port,
            "interface": interface,
            "threads": threads,
            "nice": nice,
            "lock": lock,
            "max_ram": max_ram,
            "max_vram": max_vram,
            "max_disk": max_disk,
            "pause_on_battery": pause_on_battery,
        }
    )
    _check_interface(config)
    from primad.worker.join import join as run_join

    run_join(config, RichReporter(_err), code=code, pair_at=device)


def serve(
    model: Annotated[Path, typer.Option(help="The GGUF file; the first part of a split one.", show_default=False)],
    home: Home = None,
    name: Name = None,
    cluster: Cluster = None,
    host: Annotated[str, typer.Option(help="Address of the HTTP server.")] = LOOPBACK,
    port: Annotated[int, typer.Option(help="Port of the HTTP server.", min=0, max=65_535)] = DEFAULT_HTTP_PORT,
    listen: Annotated[
        str | None,
        typer.Option(help="Address to hear the other devices on [default: all of this machine].", show_default=False),
    ] = None,
    interface: OnInterface = None,
    device: NamedDevices = None,
    wait: Annotated[
        int | None, typer.Option(help="Wait for this many devices besides this one.", min=0, show_default=False)
    ] = None,
    wait_timeout: Annotated[float, typer.Option(help="Seconds to wait for them.", min=0.1, max=86_400)] = 60.0,
    alone: Annotated[bool, typer.Option("--alone", help="Use this device only.")] = False,
    windows: Annotated[
        str | None,
        typer.Option(
            help="Set the plan by hand: layers a round for this device and each other one, as in 10,12,7. "
            "This device also computes the layers that are left at the end.",
            show_default=False,
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds a token makes, with --windows.", min=1, max=1000, show_default=False)
    ] = None,
    objective: Annotated[
        str, typer.Option(help="What the plan makes small: latency, ttft, throughput or balanced.")
    ] = "balanced",
    use_all: Annotated[
        bool,
        typer.Option("--use-all", help="Every device found gets layers, even where fewer devices would be faster."),
    ] = False,
    context: Annotated[
        int | None,
        typer.Option(
            help="Context in tokens [default: what the model was trained for, at most 4096].",
            min=16,
            max=1 << 24,
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a typical prompt, for which the plan is made [default: 512].",
            min=1,
            max=1 << 24,
            show_default=False,
        ),
    ] = None,
    kv_type: KvCacheType = "f16",
    extra_buffers: Annotated[
        str, typer.Option(help="Repacked or AMX copies of weights: auto (try and time them), on or off.")
    ] = "auto",
    step_timeout: Annotated[
        float, typer.Option(help="Seconds after which a step that is not back breaks the ring.", min=1, max=86_400)
    ] = 120.0,
    threads: Threads = None,
    nice: Nice = None,
    lock: Lock = None,
    max_ram: MaxRam = None,
    max_vram: MaxVram = None,
    max_disk: MaxDisk = None,
) -> None:
    """Serve a model with all paired devices in sight; any OpenAI client talks to it.

    Shows a code; 'primad join --code' with it on another device pairs the two for good.

    Examples:

        primad serve --model llama3-70b.gguf

        primad serve --model llama3-70b.gguf --wait 3 --context 8192

        primad serve --model qwen2.5-7b.gguf --device 192.168.1.20:7770

        primad serve --model qwen2.5-7b.gguf --objective ttft --use-all

        primad serve --model smollm2.gguf --windows 10,12,7 --rounds 1
    """
    check_host(host, "--host")
    if listen is not None:
        check_host(listen, "--listen")
    config = load_config(
        {
            "home": home,
            "name": name,
            "cluster": cluster,
            "host": listen,
            "interface": interface,
            "devices": tuple(device or ()),
            "threads": threads,
            "nice": nice,
            "lock": lock,
            "max_ram": max_ram,
            "max_vram": max_vram,
            "max_disk": max_disk,
        },
        {key: value for key, value in os.environ.items() if key != "PRIMAD_PORT"},  # a head has no control port
    )
    _check_interface(config)
    if extra_buffers not in ("auto", "on", "off"):
        raise ConfigError(f"--extra-buffers {extra_buffers}: choose auto, on or off")
    if rounds is not None and windows is None:
        raise ConfigError(f"--rounds {rounds}: goes with --windows; give both or neither")
    if alone and (wait or device):
        raise ConfigError("--alone: contradicts --wait and --device; leave one of them out")
    if use_all and (alone or windows is not None):
        raise ConfigError("--use-all: contradicts --alone and --windows; leave one of them out")
    if not is_loopback(host):
        _err.print(
            f"warning: --host {host}: the HTTP endpoint has no password and no encryption; everyone who reaches this "
            "address can use it and read along",
            markup=False,
        )
    if config.pause_on_battery:
        _err.print("pause_on_battery: means nothing to the head, without which nothing is served", markup=False)
    from primad.head.options import ServeOptions
    from primad.head.serve import serve as run_serve
    from primad.planning.question import check_objective, parse_kv_type

    options = ServeOptions(
        wait=wait,
        wait_timeout_s=wait_timeout,
        windows=None if windows is None else _windows(windows),
        rounds=rounds,
        extra_buffers=extra_buffers,
        context_tokens=context,
        prompt_tokens=prompt,
        rows=512,
        kv_type=parse_kv_type(kv_type),
        step_timeout_s=step_timeout,
        http_port=port,
        alone=alone,
        objective=check_objective(objective),
        use_all=use_all,
    )
    run_serve(config, model, options, host, RichReporter(_err))


def _windows(text: str) -> tuple[int, ...]:
    try:
        windows = tuple(int(part) for part in text.split(","))
    except ValueError as exc:
        raise ConfigError(f"--windows {text}: give whole numbers with commas between, as in 10,12,7") from exc
    if not 1 <= len(windows) <= 1000 or min(windows) < 1:
        raise ConfigError(f"--windows {text}: every window needs at least one layer")
    return windows


def _check_interface(config: Config) -> None:
    """This machine has it, said before anything is measured or loaded."""
    from primad.network.addresses import chosen_interfaces, read_interfaces

    chosen_interfaces(read_interfaces(), config.interface)
