"""Options that several commands share: one definition, one help text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from primad.cli.completion import one_of
from primad.errors import ConfigError
from primad.settings.config import Config
from primad.settings.quantities import parse_choice

if TYPE_CHECKING:
    from primad.engine.rope import Rope

Home = Annotated[
    Path | None,
    typer.Option(
        help="Home folder for configuration, profile and layer cache.", envvar="PRIMAD_HOME", show_default=False
    ),
]
Name = Annotated[str | None, typer.Option(help="This device's name [default: host name].", show_default=False)]
Cluster = Annotated[
    str | None,
    typer.Option(help="Name of the cluster; devices ignore other clusters [default: home].", show_default=False),
]
OnInterface = Annotated[
    str | None,
    typer.Option(help="Use this network only: an interface such as eth0, or its address.", show_default=False),
]
Threads = Annotated[
    int | None, typer.Option(help="Compute threads [default: as many as the profile found best].", show_default=False)
]
Nice = Annotated[
    int | None,
    typer.Option(help="Yield the CPU to other programs, 0 (not at all) to 19 [default: 0].", show_default=False),
]
Lock = Annotated[
    bool | None,
    typer.Option(
        "--lock/--no-lock",
        help="Pin resident weights in memory (mlock), so that they are never read again.",
        show_default=False,
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        help="Context in tokens [default: 16384 if that costs little, else 4096; more if it is nearly free].",
        min=16,
        max=1 << 24,
        show_default=False,
    ),
]
Experts = Annotated[
    str,
    typer.Option(
        help="Place of the experts of GPU layers: cpu (in RAM, computed by the CPU), gpu, or auto: as planned.",
        autocompletion=one_of("auto", "cpu", "gpu"),
    ),
]
KvCacheType = Annotated[
    str,
    typer.Option(
        "--kv-type",
        help="Type of the KV cache: f16, q8_0 (about half the size) or q4_0 (a quarter).",
        autocompletion=one_of("f16", "q8_0", "q4_0"),
    ),
]
Parallel = Annotated[
    str,
    typer.Option(
        "--parallel",
        help="pipeline: each device computes some of the layers; tensor: all compute a share of each layer, for wired "
        "networks; auto: the one forecast to be faster, or a ring of both.",
        autocompletion=one_of("pipeline", "tensor", "auto"),
    ),
]
MaxRam = Annotated[
    str | None,
    typer.Option(help="Memory limit: 8GB, 8GiB or 50% of all [default: free memory].", show_default=False),
]
MaxVram = Annotated[
    str | None,
    typer.Option(help="GPU memory limit: 6GB or 50%; 0B uses no GPU.", show_default=False),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        help="The GPUs to use, by name or llama.cpp's name (CUDA0,CUDA1); off: none [default: all].",
        show_default=False,
    ),
]
MaxDisk = Annotated[str | None, typer.Option(help="Size limit of the layer cache on disk: 40GB.", show_default=False)]
KvCacheFolder = Annotated[
    str | None,
    typer.Option(
        help="Keep the KV cache of prompts in this folder for later requests, or off [default: off, since it encodes "
        "what people write].",
        metavar="DIR|off",
        show_default=False,
    ),
]
KvCacheLimit = Annotated[
    str | None,
    typer.Option(help="Size limit of that folder [default: 4GB].", metavar="SIZE", show_default=False),
]
NamedDevices = Annotated[
    list[str] | None,
    typer.Option("--device", help="Address host:port of a device; repeatable.", show_default=False),
]


Mmproj = Annotated[
    Path,
    typer.Option(
        help="The image encoder, mmproj-….gguf. auto: the one next to the model or in its repository.",
        metavar="FILE|auto|none",
    ),
]
Lora = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        help="A LoRA adapter for the model, a GGUF file, and its scale (default 1); repeatable.",
        metavar="FILE[=SCALE]",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeOptions:
    """RoPE options, the same as llama.cpp's options of these names."""

    PANEL: ClassVar[str] = "RoPE, to override the model's"

    rope_scaling: Annotated[
        str | None,
        typer.Option(
            help="none, linear, yarn or longrope.",
            show_default=False,
            metavar="KIND",
            autocompletion=one_of("none", "linear", "yarn", "longrope"),
        ),
    ] = None
    rope_scale: Annotated[
        float | None, typer.Option(help="Stretch the context by this factor.", show_default=False)
    ] = None
    rope_freq_base: Annotated[float | None, typer.Option(help="Base frequency.", show_default=False)] = None
    rope_freq_scale: Annotated[float | None, typer.Option(help="1 / --rope-scale.", show_default=False)] = None
    yarn_orig_ctx: Annotated[
        int | None,
        typer.Option(help="YaRN: original context of the model.", min=1, max=1 << 26, show_default=False),
    ] = None
    yarn_ext_factor: Annotated[
        float | None, typer.Option(help="YaRN: extrapolation mix, 0 for none.", show_default=False)
    ] = None
    yarn_attn_factor: Annotated[
        float | None, typer.Option(help="YaRN: attention magnitude factor.", show_default=False)
    ] = None
    yarn_beta_slow: Annotated[
        float | None, typer.Option(help="YaRN: high correction dimension.", show_default=False)
    ] = None
    yarn_beta_fast: Annotated[
        float | None, typer.Option(help="YaRN: low correction dimension.", show_default=False)
    ] = None


def rope_of(options: RopeOptions) -> Rope:
    """The value of ``options``. Raises ``ConfigError`` naming an invalid one."""
    from primad.engine.rope import ROPE_SCALINGS, Rope

    scale, freq_scale = options.rope_scale, options.rope_freq_scale
    if scale is not None and freq_scale is not None:
        raise ConfigError("--rope-scale and --rope-freq-scale: mean the same; leave one of them out")
    if scale is not None:
        freq_scale = 1 / _within(scale, "--rope-scale", above=0.0)
    yarn = {
        f"yarn_{name}": _within(value, f"--yarn-{name.replace('_', '-')}", minimum=0.0)
        for name in ("ext_factor", "attn_factor", "beta_slow", "beta_fast")
        if (value := getattr(options, f"yarn_{name}")) is not None
    }
    return Rope(
        scaling=None
        if options.rope_scaling is None
        else parse_choice(options.rope_scaling, ROPE_SCALINGS, "--rope-scaling"),
        freq_base=0.0
        if options.rope_freq_base is None
        else _within(options.rope_freq_base, "--rope-freq-base", above=0.0),
        freq_scale=0.0 if freq_scale is None else _within(freq_scale, "--rope-freq-scale", above=0.0),
        yarn_orig_ctx=options.yarn_orig_ctx or 0,
        **yarn,
    )


def _within(number: float, flag: str, *, above: float | None = None, minimum: float | None = None) -> float:
    """``number``, if it is valid. Raises ``ConfigError`` naming ``flag``."""
    too_small = (above is not None and number <= above) or (minimum is not None and number < minimum)
    if too_small or not number <= 1e12:
        wanted = f"more than {above:g}" if above is not None else f"at least {minimum:g}"
        raise ConfigError(f"{flag} {number:g}: give a number of {wanted} and at most 1e12")
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """This device's name, cluster and home folder."""

    PANEL: ClassVar[str] = "This device"

    home: Home = None
    name: Name = None
    cluster: Cluster = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerOptions:
    """Limits of this device."""

    PANEL: ClassVar[str] = "Limits of this device"

    threads: Threads = None
    nice: Nice = None
    lock: Lock = None
    max_ram: MaxRam = None
    max_vram: MaxVram = None
    gpu: Gpu = None
    max_disk: MaxDisk = None
    kv_cache: KvCacheFolder = None
    kv_cache_limit: KvCacheLimit = None


def check_interface(config: Config) -> None:
    """Check that this machine has the interface, before anything is measured or loaded."""
    from primad.network.addresses import chosen_interfaces, read_interfaces

    chosen_interfaces(read_interfaces(), config.interface)
