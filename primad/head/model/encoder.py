"""The encoder of a model that sees or hears: where its file is, whether it is one, and what clients hear without it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from primad.errors import ConfigError, ModelError
from primad.gguf.header import Header, read_beginning
from primad.gguf.projectors import MARK, folder_of, is_projector, projector_facts, projector_of
from primad.gguf.ranged import HEADERS
from primad.planning.question import PlannedEncoder

AUTO: Final = Path("auto")
"""What ``--mmproj`` is where the file is to be looked for."""
NONE: Final = Path("none")
BEGINNING_BYTES: Final = 1 << 16
"""What is read of its file."""
_GEMMA_4_TOKENS: Final = 280
_MAX_SIDE: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class EncoderFile:
    """The encoder of a model, by which it ``sees`` or ``hears``; without one, what it ``lacks``, for whoever sends a
    picture. Of a picture at most ``whole_tokens`` see each other, and belong in one step."""

    path: Path | None = None
    lacks: str = "the model has no encoder for pictures"
    sees: bool = False
    hears: bool = False
    whole_tokens: int = 0
    memory_bytes: int = 0
    """Of the process that has it loaded, while it encodes a picture."""
    picture_flop: float = 0.0
    encoded_bytes: int = 0
    """Of a picture as large as the encoder's; 0 where the file does not say."""

    @property
    def line(self) -> str:
        """For the owner."""
        taken = [what for what, takes in (("pictures", self.sees), ("sound", self.hears)) if takes]
        return f"requests may have {' and '.join(taken)}, which {self.path} encodes"

    @property
    def planned(self) -> PlannedEncoder | None:
        """What plans know of it."""
        if self.path is None:
            return None
        return PlannedEncoder(
            sees=self.sees,
            hears=self.hears,
            memory_bytes=self.memory_bytes,
            picture_flop=self.picture_flop,
            encoded_bytes=self.encoded_bytes,
        )


NO_ENCODER: Final = EncoderFile()


def encoder_file(given: Path, model: Path, known: Path | None, max_tokens: int = 0) -> tuple[EncoderFile, str]:
    """What ``--mmproj`` says of the ``model`` file, whose encoder the library may have ``known``; and a line for the owner.
    Pictures whose size is not fixed have at most ``max_tokens``; 0: as the encoder says.

    Raises ``ConfigError`` for a file that is no encoder of pictures.
    """
    if given == NONE:
        return EncoderFile(None, "this server was started with --mmproj none, so no model of it takes pictures"), ""
    if given != AUTO:
        chosen = _checked(given, f"--mmproj {given}", max_tokens)
        return chosen, chosen.line
    found = known or projector_beside(model)
    if found is None:
        return EncoderFile(None, lacking(model)), ""
    try:
        chosen = _checked(found, str(found), max_tokens)
        return chosen, f"{chosen.line}; --mmproj none leaves it out"
    except ConfigError as exc:
        named = str(exc).replace(str(found), found.name)  # clients are told no folders
        return EncoderFile(None, f"the model's encoder for pictures cannot be used: {named}"), f"no pictures: {exc}"


def lacking(model: Path) -> str:
    """What is missing for a ``model`` without an encoder, and how to get it."""
    return (
        f"no encoder for pictures is beside the model: if it can see, its publisher offers a file {MARK}-….gguf, which "
        f"'primad pull' fetches too; put it beside {model.name}, or give it to 'primad serve --{MARK} FILE', and start "
        "that again"
    )


def projector_beside(model: Path, *, is_repository: bool = False) -> Path | None:
    """The encoder of the ``model`` file that is in its folder, which may be a repository's, as the library chooses it."""
    folders = {folder_of(model), model.parent}
    if model.parent.parent.name == HEADERS:  # of a model of the hub whose header alone is here
        place = model.parent.parent.parent
        folders = {place, *place.glob(f"{HEADERS}/*")}
    try:
        files = [path for folder in folders for path in folder.iterdir()]
    except OSError:
        return None
    encoders = {each.name: each for each in files if is_projector(each.name)}
    models = [each.name for each in files if each.suffix.lower() == ".gguf" and each.name not in encoders]
    found = projector_of(model.name, models, encoders, is_repository=is_repository)
    return None if found is None else encoders[found]


def _checked(path: Path, what: str, max_tokens: int) -> EncoderFile:
    try:
        header = read_beginning(path, BEGINNING_BYTES)
        architecture, whole_tokens = header.text("general.architecture"), _whole_tokens(header, max_tokens)
    except ModelError as exc:
        raise ConfigError(f"{what}: {exc}; name the file {MARK}-….gguf that the model's publisher offers") from exc
    if architecture != "clip":
        raise ConfigError(f"{what}: is no encoder of pictures; name the file {MARK}-….gguf of the model's publisher")
    facts = projector_facts(header)
    if facts.problem:
        raise ConfigError(f"{what}: {facts.problem}")
    return EncoderFile(
        path,
        "" if facts.sees else "the model's encoder takes sound, and no pictures",
        sees=facts.sees,
        hears=facts.hears,
        whole_tokens=whole_tokens,
        memory_bytes=facts.memory_bytes,
        picture_flop=facts.picture_flop,
        encoded_bytes=facts.encoded_bytes,
    )


def _whole_tokens(header: Header, max_tokens: int) -> int:
    """As llama.cpp's libmtmd has them: a square of a fixed size (Gemma 3), or at most so many (Gemma 4)."""
    kind = header.text("clip.vision.projector_type", "") or header.text("clip.projector_type", "")
    if kind != "gemma3":
        return max_tokens or _GEMMA_4_TOKENS if kind in ("gemma4v", "gemma4uv") else 0
    side, patch = (header.count(f"clip.vision.{each}", maximum=_MAX_SIDE) for each in ("image_size", "patch_size"))
    merged = header.count("clip.vision.projector.scale_factor", 4)
    return int((side // max(1, patch) // max(1, merged)) ** 2)
