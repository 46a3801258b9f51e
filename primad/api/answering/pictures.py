"""Places a request's pictures in its prompt, and sounds, which are treated alike. Pure, except for a salt of this
process.

In the text of a message a picture is a marker, which no client can guess and every chat template writes like any other
word. The text that the template wrote is cut at the markers, and each piece is tokenized by itself, as in llama.cpp's
libmtmd. A picture's embeddings are known only once it is encoded; then the request is prepared again.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import msgspec

from primad.api.answering.backend import TextModel, Vocabulary
from primad.errors import RequestError, printable

MAX_PICTURES: Final = 100
"""Limit for one request."""
MAX_FETCHED: Final = 16
_SALT: Final = secrets.token_bytes(16)
_DATA_URL: Final = re.compile(r"data:(?P<type>[\w.+/-]*)(?:;[\w.=+-]+)*?;base64,", re.ASCII)


class Picture(msgspec.Struct, frozen=True):
    """A picture's file, which the request has ``called`` so, or the ``url`` to fetch it from."""

    called: str
    data: bytes
    url: str = ""

    @property
    def digest(self) -> str:
        """The identifier of the picture."""
        return hashlib.sha256(self.data or self.url.encode()).hexdigest()


class PicturesWantedError(Exception):
    """A request has ``pictures`` whose token ids are not known yet. Prepare it again when they are."""

    def __init__(self, pictures: list[Picture]) -> None:
        super().__init__(f"{len(pictures)} images are to be encoded first")
        self.pictures = pictures


class PicturePlace(msgspec.Struct, frozen=True, array_like=True):
    """The picture with this ``digest`` starts at position ``first`` of a prompt."""

    first: int
    digest: str


class PromptTokens(NamedTuple):
    """A prompt: its token ids, below 0 for embeddings of pictures, and where the pictures are."""

    tokens: list[int]
    pictures: tuple[PicturePlace, ...] = ()


@dataclass(frozen=True, slots=True)
class KnownPicture:
    """An encoded picture: the token ids that represent it in a prompt."""

    called: str
    digest: str
    ids: Sequence[int]


class SentPicture(NamedTuple):
    """A picture or sound as a client sent it, which it ``called`` so: base64, or a URL with base64 data. An empty
    ``kind`` is detected from the file."""

    called: str
    source: str
    kind: Literal["picture", "sound", ""]


def marker_of(source: str) -> str:
    """Return the marker that represents a picture in a text."""
    return f"qzpicture{hashlib.blake2s(source.encode(errors='replace'), key=_SALT, digest_size=16).hexdigest()}x"


def known_pictures(sent: Sequence[SentPicture], served: TextModel) -> dict[str, KnownPicture]:
    """Return the pictures of a request by their markers.

    Raises ``RequestError`` for data that is not a picture, or if the model sees none, and ``PicturesWantedError``.
    """
    if not sent:
        return {}
    takes = {"picture": served.sees, "sound": served.hears, "": served.sees or served.hears}
    if (refused := next((each for each in sent if not takes[each.kind]), None)) is not None:
        hears_nothing = refused.kind == "sound" and served.sees
        why = "the model's encoder accepts images, but no audio" if hears_nothing else served.lacks_encoder
        raise RequestError(f"{refused.called}: {why}", code="no_pictures", param=refused.called, of_model=True)
    if len(sent) > MAX_PICTURES:
        at = sent[MAX_PICTURES].called
        raise RequestError(f"{at}: a request may have {MAX_PICTURES} images; this one has {len(sent)}", param=at)
    pictures = {marker_of(each.source): _picture(each, fetches=served.fetches) for each in sent}
    if (count := sum(bool(each.url) for each in pictures.values())) > MAX_FETCHED:
        raise RequestError(f"a request may have {MAX_FETCHED} images by URL; this one has {count}", param="messages")
    digests = {marker: each.digest for marker, each in pictures.items()}
    unseen = {digests[marker]: each for marker, each in pictures.items() if digests[marker] not in served.seen}
    if unseen:
        raise PicturesWantedError(list(unseen.values()))
    return {
        marker: KnownPicture(each.called, digests[marker], served.seen[digests[marker]])
        for marker, each in pictures.items()
    }


def _picture(sent: SentPicture, *, fetches: bool) -> Picture:
    if fetches and sent.source.startswith(("http://", "https://")):
        return Picture(sent.called, b"", sent.source)
    return Picture(sent.called, _content(sent))


def _content(sent: SentPicture) -> bytes:
    source = sent.source
    if (url := _DATA_URL.match(source)) is not None:
        kind = url["type"].partition("/")[0]
        if kind not in ("image", "", "application", "audio"):
            raise RequestError(f"{sent.called}: is of type {kind}; only images are supported", param=sent.called)
        source = source[url.end() :]
    elif ":" in source[:64]:
        scheme = printable(source.partition(":")[0], 32)
        raise RequestError(
            f"{sent.called}: this server fetches no images ({scheme}: URL); send the file itself, as "
            "data:image/png;base64,... ('primad serve --fetch-images' allows http and https)",
            code="no_fetching",
            param=sent.called,
        )
    try:
        data = base64.b64decode("".join(source.split()).encode("ascii"), validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if not data:
        raise RequestError(f"{sent.called}: is not the base64 of an image file", param=sent.called)
    return data


def check_all_shown(text: str, known: Mapping[str, KnownPicture]) -> None:
    """Raise ``RequestError`` for a picture that the chat template left out of the prompt ``text``."""
    left_out = next((each for marker, each in known.items() if marker not in text), None)
    if left_out is not None:
        raise RequestError(f"{left_out.called}: the model's chat template leaves this image out", param="messages")


def tokens_with_pictures(
    vocabulary: Vocabulary, text: str, known: Mapping[str, KnownPicture], *, add_special: bool
) -> PromptTokens:
    """Return the token ids of ``text``, with those of pictures where their markers are; only its start may get special
    tokens."""
    if not known:
        return PromptTokens(vocabulary.tokenize(text, add_special=add_special, parse_special=True))
    tokens, places = list[int](), list[PicturePlace]()
    for number, part in enumerate(re.split(f"({'|'.join(known)})", text)):
        picture = known.get(part)
        if picture is not None:
            places.append(PicturePlace(len(tokens), picture.digest))
            tokens += picture.ids
        elif part or not number:
            tokens += vocabulary.tokenize(part, add_special=add_special and not number, parse_special=True)
    return PromptTokens(tokens, tuple(places))


def without_markers(text: str, known: Mapping[str, object], shown: str) -> str:
    """Return ``text`` for clients, with ``shown`` in place of each picture."""
    return re.sub("|".join(known), lambda _: shown, text) if known else text
