"""The planner's question: devices, links, model, workload, wishes. Everything that may be wrong with it is checked
here.

``Wishes`` are what the command line says; ``Question`` is what they mean. Nothing here opens a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from halda import KV_BLOCK, CacheType, DeviceProfile, Limits, LinkProfile, ModelProfile, ShareBytes, Workload
from halda.cost import WITHOUT_FLASH
from halda.instance import DEFAULT_LINK_BYTES_PER_S, DEFAULT_ROUND_TRIP_S
from primad.errors import ConfigError
from primad.gguf.splits import MAX_RANKS, ShareUnits
from primad.gguf.whole_attention import of_shape
from primad.planning.default_context import first_context
from primad.planning.drafting import rollback_of
from primad.planning.run_config import DEFAULT_RUN, RunConfig
from primad.settings.quantities import parse_bytes, parse_rate, parse_seconds

SOLVE_S: Final = 5.0
"""CPU time of the solver; a plan that is not proven optimal by then comes with its largest possible distance from the
optimum."""
DEFAULT_PROMPT_TOKENS: Final = 512
DEFAULT_ANSWER_TOKENS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """Throughput, round-trip time, and delay of one message in twenty, for links in both directions."""

    bytes_per_s: float
    round_trip_s: float
    late_s: float = 0.0


DEFAULT_LINK: Final = LinkSpeed(bytes_per_s=DEFAULT_LINK_BYTES_PER_S, round_trip_s=DEFAULT_ROUND_TRIP_S)
SAME_MACHINE: Final = LinkSpeed(bytes_per_s=2e9, round_trip_s=0.0004)
"""Link between processes on one machine, where nothing was measured: loopback and the software of a hop on either side.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What was asked for besides devices and model; options per device as given, None or empty where there were none."""

    run: RunConfig = DEFAULT_RUN
    head: str | None = None
    links: tuple[str, ...] = ()
    max_ram: tuple[str, ...] = ()
    max_vram: tuple[str, ...] = ()
    max_disk: tuple[str, ...] = ()
    time_limit_s: float = SOLVE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDraft:
    """The draft model in file ``path``, and the RAM of its process: on the head, where that has room.

    Unless it ``may_move`` no other device can run it.
    """

    path: str
    model: ModelProfile
    memory_bytes: int
    head_has_room: bool = True
    may_move: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEncoder:
    """The encoder of pictures, if the model ``sees``, and of sound; its process takes ``memory_bytes``, always reserved
    on the head.

    A picture takes ``picture_flop`` and becomes ``encoded_bytes``; 0 where the file does not say.
    """

    sees: bool
    hears: bool
    memory_bytes: int
    picture_flop: float = 0.0
    encoded_bytes: int = 0


def senses(sees: bool, hears: bool) -> str:
    """Say what a model can do; empty for neither."""
    return " and ".join(word for word, can in (("vision", sees), ("audio", hears)) if can)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be planned. ``head`` is None where the best head is to be found.

    ``links`` are the known ones; other pairs get ``default_link``. ``draft`` is the draft model, if there is one,
    ``encoder`` the picture encoder. A model not known to be exact for concurrent requests runs one at a time
    (``may_be_several``). At most ``max_ranks`` devices share each layer, cut by ``units`` where these are known, and
    then hold ``share_bytes`` of the file.
    """

    devices: tuple[DeviceProfile, ...]
    links: tuple[LinkProfile, ...]
    default_link: LinkSpeed
    model: ModelProfile
    run: RunConfig
    limits: Mapping[str, Limits]
    head: str | None
    time_limit_s: float
    draft: PlannedDraft | None = None
    encoder: PlannedEncoder | None = None
    may_be_several: bool = True
    max_ranks: int = MAX_RANKS
    units: ShareUnits | None = None
    share_bytes: ShareBytes | None = None

    @property
    def workload(self) -> Workload:
        """The workload that is solved for first."""
        return workload_of(self.run, self.model)

    @property
    def heads(self) -> list[str]:
        """The devices that may be head."""
        return [device.device for device in self.devices] if self.head is None else [self.head]

    @property
    def all_links(self) -> tuple[LinkProfile, ...]:
        """A link for every ordered pair of devices."""
        return with_default_links(self.devices, self.links, self.default_link)


def ask(
    wishes: Wishes, devices: Sequence[DeviceProfile], links: Sequence[LinkProfile], model: ModelProfile
) -> Question:
    """Build the question from ``wishes``. Raises ``ConfigError`` naming the flag that is wrong."""
    names = unique_names(devices)
    default_link, known = _links(wishes.links, links, names)
    workload_of(wishes.run, model)
    max_ranks, units = of_shape(model)
    return Question(
        devices=tuple(devices),
        links=known,
        default_link=default_link,
        model=model,
        run=wishes.run,
        limits=_limits(wishes, names),
        head=None if wishes.head is None else check_name(wishes.head, names, "--head"),
        time_limit_s=wishes.time_limit_s,
        max_ranks=max_ranks,
        units=units,
    )


def with_room_for_encoder(question: Question, head: str) -> Question:
    """Return ``question`` for ``head``, with the picture encoder's part taken from its RAM."""
    if question.encoder is None:
        return question
    return replace(
        question, head=head, devices=tuple(without_ram(question.devices, head, question.encoder.memory_bytes))
    )


def without_ram(devices: Iterable[DeviceProfile], name: str, taken_bytes: int) -> list[DeviceProfile]:
    """Return ``devices`` with ``taken_bytes`` less RAM on the one called ``name``."""
    return [
        replace(each, ram_available_bytes=max(0, each.ram_available_bytes - taken_bytes))
        if each.device == name
        else each
        for each in devices
    ]


def check(wishes: Wishes) -> None:
    """Check what can be checked before devices are discovered. Raises ``ConfigError``."""
    for text in wishes.links:
        _split_link(text)


def unique_names(devices: Iterable[DeviceProfile]) -> tuple[str, ...]:
    """Return the names of the devices. Raises ``ConfigError`` when there are none, or two are the same."""
    names = tuple(device.device for device in devices)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two devices are called {twice}; give each a name of its own ('device' in its profile)")
    if not names:
        raise ConfigError("there is no device to plan for; name profile files with --devices or a fleet with --fleet")
    return names


def check_name(name: str, names: Sequence[str], source: str) -> str:
    """Return ``name`` if a device has it. Raises ``ConfigError`` naming ``source`` and the existing devices."""
    if name not in names:
        raise ConfigError(f"{source}: no device is called {name!r}; there are {', '.join(names)}")
    return name


def workload_of(run: RunConfig, model: ModelProfile) -> Workload:
    """Return the workload to plan for first: one sequence unless more were asked for, and the small context.

    Raises ``ConfigError`` where prompt and completion, or the KV cache, do not suit the model.
    """
    check_kv_type(run.kv_type, model)
    work = default_workload(
        first_context(run.context_tokens, model),
        run.chunk_rows,
        run.kv_type,
        sequences=run.sequences or 1,
        prompt_tokens=run.prompt_tokens,
        answer_tokens=run.answer_tokens,
    )
    rollback = rollback_of(run.speculate, run.batching, model)
    return replace(work, rollback=rollback, whole_rows=run.whole_rows, wire=run.wire)


def default_workload(
    context_tokens: int,
    rows: int,
    kv_type: CacheType,
    *,
    sequences: int = 1,
    prompt_tokens: int | None = None,
    answer_tokens: int | None = None,
) -> Workload:
    """Return the workload of a plan: the prompt and completion that were asked for, or typical ones within the context.

    Raises ``ConfigError`` when they do not fit it.
    """
    prompt = min(DEFAULT_PROMPT_TOKENS, max(1, context_tokens // 2)) if prompt_tokens is None else prompt_tokens
    answer = min(DEFAULT_ANSWER_TOKENS, max(1, context_tokens - prompt)) if answer_tokens is None else answer_tokens
    if prompt >= context_tokens:
        raise ConfigError(
            f"--prompt {prompt}: leaves no room for a response in a context of {context_tokens} tokens; "
            "give a larger --context"
        )
    if prompt + answer > context_tokens:
        raise ConfigError(
            f"--prompt {prompt} and --answer {answer} take more than the context of {context_tokens} tokens; "
            "give a larger --context or less of them"
        )
    return Workload(
        context_tokens=context_tokens,
        kv_type=kv_type,
        sequences=sequences,
        prompt_tokens=prompt,
        answer_tokens=answer,
        chunk_rows=rows,
    )


def parse_link(text: str, source: str) -> LinkSpeed:
    """Parse a link as in ``1Gbit/s,2ms`` or ``300Mbit/s,4ms,10ms``: rate, round trip, delay of one message in twenty.

    The times may be left out. Raises ``ConfigError``.
    """
    rate, comma, times = text.partition(",")
    trip, and_late, late = times.partition(",")
    return LinkSpeed(
        bytes_per_s=parse_rate(rate, source),
        round_trip_s=parse_seconds(trip, source) if comma else DEFAULT_LINK.round_trip_s,
        late_s=parse_seconds(late, source) if and_late else 0.0,
    )


def both_ways(a: str, b: str, speed: LinkSpeed) -> tuple[LinkProfile, LinkProfile]:
    """The links between two devices."""
    return _link(a, b, speed), _link(b, a, speed)


def with_links(links: Iterable[LinkProfile], chosen: Iterable[LinkProfile]) -> tuple[LinkProfile, ...]:
    """Return ``links``, replaced by ``chosen`` between the same devices."""
    by_pair = {(link.source, link.target): link for link in (*links, *chosen)}
    return tuple(by_pair.values())


def with_default_links(
    devices: Sequence[DeviceProfile], links: Iterable[LinkProfile], default: LinkSpeed = DEFAULT_LINK
) -> tuple[LinkProfile, ...]:
    """Return a link for every ordered pair of ``devices``: from ``links``, or ``default`` where nothing was measured."""
    known = {(link.source, link.target): link for link in links}
    return tuple(
        known.get((a.device, b.device)) or _link(a.device, b.device, SAME_MACHINE if a.host == b.host else default)
        for a in devices
        for b in devices
        if a is not b
    )


def _link(source: str, target: str, speed: LinkSpeed) -> LinkProfile:
    return LinkProfile(
        source=source,
        target=target,
        address="",
        round_trip_s=speed.round_trip_s,
        bytes_per_s=speed.bytes_per_s,
        late_s=speed.late_s,
    )


def _split_link(text: str) -> tuple[tuple[str, str] | None, LinkSpeed]:
    """Parse ``1Gbit/s,2ms`` for all links, ``desk:laptop=300Mbit/s,4ms`` for those between two devices."""
    where, equals, speed = text.rpartition("=")
    if not equals:
        return None, parse_link(text, "--link")
    a, _, b = where.partition(":")
    if not a or not b or a == b:
        raise ConfigError(f"--link {text}: give two devices as in desk:laptop=300Mbit/s,4ms, or none for all links")
    return (a, b), parse_link(speed, f"--link {where}")


def _links(
    texts: Sequence[str], links: Sequence[LinkProfile], names: Sequence[str]
) -> tuple[LinkSpeed, tuple[LinkProfile, ...]]:
    default, chosen = DEFAULT_LINK, list[LinkProfile]()
    for text in texts:
        pair, speed = _split_link(text)
        if pair is None:
            default = speed
        else:
            a, b = (check_name(name, names, "--link") for name in pair)
            chosen += both_ways(a, b, speed)
    return default, with_links(links, chosen)


def _limits(wishes: Wishes, names: Sequence[str]) -> dict[str, Limits]:
    def sizes(texts: Sequence[str], flag: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for text in texts:
            name, equals, size = text.partition("=")
            if not equals:
                raise ConfigError(f"{flag} {text}: give a device and a size, as in {flag} {names[0]}=16GiB")
            found[check_name(name, names, flag)] = parse_bytes(size, f"{flag} {name}")
        return found

    ram = sizes(wishes.max_ram, "--max-ram")
    vram = sizes(wishes.max_vram, "--max-vram")
    disk = sizes(wishes.max_disk, "--max-disk")
    return {
        name: Limits(ram_bytes=ram.get(name), vram_bytes=vram.get(name), disk_bytes=disk.get(name))
        for name in {*ram, *vram, *disk}
    }


def check_kv_type(kv_type: CacheType, model: ModelProfile) -> None:
    """Check that llama.cpp supports such a KV cache for ``model``. Raises ``ConfigError``."""
    if kv_type == "f16":
        return
    if model.kv_head_width % KV_BLOCK:
        raise ConfigError(
            f"--kv-type {kv_type}: needs heads of a multiple of {KV_BLOCK} values; those of {model.name} have "
            f"{model.kv_head_width}; choose f16"
        )
    if model.architecture in WITHOUT_FLASH:
        raise ConfigError(
            f"--kv-type {kv_type}: needs flash attention, which llama.cpp does not have for {model.architecture}; choose f16"
        )
