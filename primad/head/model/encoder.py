"""The encoder of a model that sees or hears: finds its file, checks it, and explains to clients why there is none."""

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
"""The value of ``--mmproj`` that has the file looked up."""
NONE: Final = Path("none")
BEGINNING_BYTES: Final = 1 << 16
"""Number of bytes to read of the file."""
_GEMMA_4_TOKENS: Final = 280
_MAX_SIDE: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class EncoderFile:
    """The encoder of a model, by which it ``sees`` or ``hears``. Without one, ``lacks`` tells clients that send a
    picture what is missing. At most ``whole_tokens`` tokens of a picture attend to each other, and belong in one
    step."""

    path: Path | None = None
    lacks: str = "the model has no encoder for images"
    sees: bool = False
    hears: bool = False
    whole_tokens: int = 0
    memory_bytes: int = 0
    """Memory of the process that has loaded it, while it encodes a picture."""
    picture_flop: float = 0.0
    encoded_bytes: int = 0
    """Size of an encoded picture that is as large as the encoder's input; 0 if the file does not say."""

    @property
    def line(self) -> str:
        """The line for the owner."""
        taken = [what for what, takes in (("images", self.sees), ("audio", self.hears)) if takes]
        return f"requests may have {' and '.join(taken)}, which {self.path} encodes"

    @property
    def planned(self) -> PlannedEncoder | None:
        """The encoder's part of plans."""
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
    """Return the encoder that ``--mmproj`` chooses for the ``model`` file, and a line for the owner. ``known`` is the
    encoder in the library.

    Pictures whose size is not fixed have at most ``max_tokens``; 0: the encoder's own limit. Raises ``ConfigError`` for
    a file that is not an encoder of pictures.
    """
    if given == NONE:
        return EncoderFile(None, "this server was started with --mmproj none, so none of its models accepts images"), ""
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
        named = str(exc).replace(str(found), found.name)  # clients must not learn folders
        return EncoderFile(None, f"the model's encoder for images cannot be used: {named}"), f"no images: {exc}"


def lacking(model: Path) -> str:
    """Explain what is missing for a ``model`` without an encoder, and how to get it."""
    return (
        f"no image encoder is next to the model; if this is a vision model, its publisher offers a file {MARK}-….gguf, "
        f"which 'primad pull' fetches too; put it next to {model.name}, or give it to 'primad serve --{MARK} FILE', "
        "and start that again"
    )


def projector_beside(model: Path, *, is_repository: bool = False) -> Path | None:
    """Return the encoder in the folder of the ``model`` file, which may be a repository, chosen like in the library."""
    folders = {folder_of(model), model.parent}
    if model.parent.parent.name == HEADERS:  # a model on the hub, of which only the header is here
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
        raise ConfigError(f"{what}: is not an image encoder; name the file {MARK}-….gguf of the model's publisher")
    facts = projector_facts(header)
    if facts.problem:
        raise ConfigError(f"{what}: {facts.problem}")
    return EncoderFile(
        path,
        "" if facts.sees else "the model's encoder accepts audio, but no images",
        sees=facts.sees,
        hears=facts.hears,
        whole_tokens=whole_tokens,
        memory_bytes=facts.memory_bytes,
        picture_flop=facts.picture_flop,
        encoded_bytes=facts.encoded_bytes,
    )


def _whole_tokens(header: Header, max_tokens: int) -> int:
    """Return the number as llama.cpp's libmtmd has it: a square of fixed size (Gemma 3), or a maximum (Gemma 4)."""
    kind = header.text("clip.vision.projector_type", "") or header.text("clip.projector_type", "")
    if kind != "gemma3":
        return max_tokens or _GEMMA_4_TOKENS if kind in ("gemma4v", "gemma4uv") else 0
    side, patch = (header.count(f"clip.vision.{each}", maximum=_MAX_SIDE) for each in ("image_size", "patch_size"))
    merged = header.count("clip.vision.projector.scale_factor", 4)
    return int((side // max(1, patch) // max(1, merged)) ** 2)
