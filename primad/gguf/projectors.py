"""Encoders of pictures and sound: the facts in their file's header, and the model they belong to, by file names.

llama.cpp calls such a file a projector, after its last part; publishers name it ``mmproj-….gguf``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from primad.errors import ModelError, printable
from primad.gguf.header import Header
from primad.gguf.model import PART_NAME, quantisation_in

MARK: Final = "mmproj"
TAKEN: Final = frozenset(
    (
        "adapter", "deepseekocr", "deepseekocr2", "dots_ocr", "exaone4_5", "gemma3", "gemma4a", "gemma4ua", "gemma4uv",
        "gemma4v", "glm4v", "glm5v", "glma", "granite_speech", "hunyuanvl", "idefics3", "internvl", "janus_pro",
        "kimik25", "kimivl", "ldp", "ldpv2", "lfm2", "lfm2a", "lightonocr", "ling3vl", "llama4", "meralion",
        "mimo_audio", "mimovl", "minicpmv4_6", "minimax_m3", "mlp", "muse-glimmer", "musicflamingo", "nemotron_v2_vl",
        "paddleocr", "parakeet", "phi4", "pixtral", "qwen2.5vl_merger", "qwen2a", "qwen2vl_merger", "qwen3a",
        "qwen3vl_merger", "resampler", "step3vl", "ultravox", "voxtral", "yasa2", "youtuvl",
    )
)  # fmt: skip
"""Types whose pictures and sounds were compared with libmtmd's (``tools/lab/encoders.py`` has them all)."""
_OF_TWO: Final = {"qwen2.5o": {"vision": "qwen2.5vl_merger", "audio": "qwen2a"}}
"""A type that means one projector for pictures and another for sound."""
_ORDER: Final = ("F16", "Q8_0", "BF16", "F32")
"""Quantisations in order of preference."""
_MAX_TYPE_CHARS: Final = 32
BESIDE_BYTES: Final = 256 << 20
"""Memory of an encoder's process besides weights and buffers: Python, the model's tokens, the picture."""
_STATES: Final = 4
"""Values of the encoder's width that the buffers hold per patch, in addition to those of its feed-forward layer, as
measured."""
_FRAMES: Final = 3000
"""Patches of half a minute of sound."""
_MAX_SIDE: Final = 1 << 14
SEE: Final = frozenset(
    (
        "gemma4",
        "hunyuan_vl",
        "llama4",
        "deepseek2-ocr",
        "paddleocr",
        "qwen2vl",
        "qwen3vl",
        "qwen3vlmoe",
        "qwen35",
        "qwen35moe",
    )
)
"""Architectures of which all models accept pictures; for others, the tags in the file show it."""
_TAGS: Final = frozenset(("image-text-to-text", "any-to-any", "audio-text-to-text", "image-to-text"))
"""Publishers' tags on the hub for models that take more than text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorFacts:
    """Whether an encoder ``sees`` or ``hears``, the types of its projectors, and the memory of the process that has it
    loaded, while it encodes a picture; ``problem`` is one line on why it cannot be used, empty if it can.

    A picture of the encoder's size takes about ``picture_flop`` to compute, and its encoded rows have ``encoded_bytes``
    (four patches make one row in most models); 0 if the file does not say.
    """

    sees: bool
    hears: bool
    types: tuple[str, ...] = ()
    memory_bytes: int = 0
    picture_flop: float = 0.0
    encoded_bytes: int = 0
    problem: str = ""


def projector_facts(header: Header) -> ProjectorFacts:
    """The facts in the ``header`` of an encoder's file, as llama.cpp reads them."""
    has = {sense: _flag(header, f"clip.has_{sense}_encoder") for sense in ("vision", "audio")}
    types = {sense: _type(header, sense) for sense, is_there in has.items() if is_there}
    unknown = [each for each in types.values() if each not in TAKEN]
    problem = "" if types else "it accepts neither images nor audio"
    if unknown:
        named = f"the type {unknown[0]!r}" if unknown[0] else "no type of projector"
        problem = (
            f"it has {named}, which this primad does not support; a newer primad may, and without it the model reads text "
            f"(--{MARK} none)"
        )
    flop, rows_bytes = _picture(header, "clip.vision" if has["vision"] else "clip.audio")
    return ProjectorFacts(
        sees=has["vision"],
        hears=has["audio"],
        types=tuple(types.values()),
        memory_bytes=_memory_bytes(header),
        picture_flop=flop,
        encoded_bytes=rows_bytes,
        problem=problem,
    )


def wants_projector(header: Header) -> bool:
    """Whether the model of ``header`` can take more than text, for which it needs an encoder."""
    tags = header.values.get("general.tags")
    named = {str(each) for each in tags.items()} if tags is not None and tags.is_array else set()
    return _text(header, "general.architecture") in SEE or bool(named & _TAGS)


def memory_bytes(file_bytes: int, patches: int, width: int, feed_forward: int) -> int:
    """Memory of an encoder's process: weights, ``BESIDE_BYTES``, and the buffers of a picture of ``patches``."""
    return file_bytes + BESIDE_BYTES + 4 * patches * (feed_forward + _STATES * width)


def _memory_bytes(header: Header) -> int:
    """``memory_bytes`` for a file and a picture of the encoder's size."""
    sizes = [_sizes(header, f"clip.{each}") for each in ("vision", "audio")]
    return max(memory_bytes(header.path.stat().st_size, *each) for each in sizes)


def _picture(header: Header, prefix: str) -> tuple[float, int]:
    """FLOP to encode a picture of the encoder's size, and the bytes of its encoded rows."""
    patches, width, inner = _sizes(header, prefix)
    try:
        layers, projected = header.count(f"{prefix}.block_count", 0), header.count(f"{prefix}.projection_dim", 0)
    except ModelError:
        return 0.0, 0
    return picture_flop(layers, patches, width, inner), encoded_bytes(patches, projected)


def picture_flop(layers: int, patches: int, width: int, feed_forward: int) -> float:
    """FLOP to encode a picture of ``patches``."""
    products = 2 * patches * width * (4 * width + 2 * feed_forward) + 4 * patches**2 * width
    return float(layers * products)


def encoded_bytes(patches: int, model_width: int) -> int:
    """Bytes of a picture's encoded rows; four patches make one row."""
    return patches // 4 * model_width * 4


def _sizes(header: Header, prefix: str) -> tuple[int, int, int]:
    """The number of patches, the width and the feed-forward width; zeros if they are not as llama.cpp requires."""
    try:
        width, inner = header.count(f"{prefix}.embedding_length", 0), header.count(f"{prefix}.feed_forward_length", 0)
        side = header.count(f"{prefix}.image_size", 0, maximum=_MAX_SIDE)
        patches = (side // max(1, header.count(f"{prefix}.patch_size", 1))) ** 2 if side else _FRAMES
    except ModelError:
        return 0, 0, 0
    return (patches, width, inner) if width else (0, 0, 0)


def _type(header: Header, sense: str) -> str:
    kind = _text(header, "clip.projector_type") or _text(header, f"clip.{sense}.projector_type")
    return _OF_TWO.get(kind, {}).get(sense, kind)


def _text(header: Header, key: str) -> str:
    try:
        return printable(header.text(key, ""), _MAX_TYPE_CHARS)
    except ModelError:
        return ""


def _flag(header: Header, key: str) -> bool:
    value = header.values.get(key)
    return value is not None and not value.is_array and bool(value.scalar())


def projector_of(model: str, models: Iterable[str], projectors: Iterable[str], *, is_repository: bool) -> str | None:
    """The file of ``projectors`` that belongs to the file ``model`` among ``models``; all are names.

    Prefer a projector with the model's name, the longest such name first. Otherwise, if the model is the only one there
    or has its own repository, take one without another model's name. Of several quantisations F16 comes first.
    """
    own, others = _core(model), {_core(each) for each in models}
    is_only = is_repository or others <= {own}
    fitting: dict[str, str] = {}
    for name in sorted(projectors, key=lambda each: (len(each), each)):
        core = _core(name)
        if own.startswith(core) if core else is_only:
            fitting[name] = core
        elif is_only and not any(each.startswith(core) for each in others):
            fitting[name] = ""
    return min(fitting, key=lambda name: (-len(fitting[name]), _rank(name)), default=None)


def folder_of(file: Path) -> Path:
    """The folder of the encoder of the model ``file``: some publishers have a subfolder for each quantisation."""
    return file.parent.parent if quantisation_in(file.parent.name) else file.parent


def is_projector(name: str) -> bool:
    """Whether ``name`` is a file name of an encoder."""
    return MARK in name.lower() and name.lower().endswith(".gguf")


def _rank(name: str) -> tuple[int, int]:
    kind = quantisation_in(name.lower().removesuffix(".gguf"))
    return (_ORDER.index(kind) if kind in _ORDER else len(_ORDER)), len(name)


def _core(name: str) -> str:
    """The model's name in the name of its file or encoder, without the quantisation."""
    part = PART_NAME.fullmatch(name)
    stem = (name if part is None else part["stem"]).lower().removesuffix(".gguf").replace(MARK, "").strip("-_.")
    stem = stem.removesuffix(quantisation_in(stem).lower()).strip("-_.")
    return stem.removesuffix("-ud").removesuffix(".i1")
