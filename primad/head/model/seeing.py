"""Prepares requests with pictures: once to find the pictures, and again with the encoded pictures."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from primad.api.answering.backend import Prepared
from primad.api.answering.job import Job, Prompt
from primad.api.answering.pictures import Picture, PicturesWantedError
from primad.engine.pictures.messages import MAX_CONTENT_BYTES, EncodedPicture
from primad.errors import EngineError, RequestError
from primad.head.model.fetching import Encode, PictureFetcher
from primad.ring.pictures import placed
from primad.settings.quantities import show_bytes

PictureIds = Mapping[str, Sequence[int]]
"""The token ids of pictures, by digest."""
_Made = TypeVar("_Made", bound=msgspec.Struct)


async def prepare_seeing(
    prepare: Callable[[PictureIds], Awaitable[Prepared]], encode: Encode, fetcher: PictureFetcher
) -> Prepared:
    """Prepare a request with ``prepare``. Pictures in it are encoded by ``encode``, those with URLs after ``fetcher``
    fetched them.

    Raises ``RequestError``.
    """
    try:
        return await prepare({})
    except PicturesWantedError as exc:
        wanted = exc.pictures
    seen = await _encoded(wanted, encode, fetcher)
    return _with_content(await prepare({digest: placed(each, 0)[0] for digest, each in seen.items()}), seen)


async def _encoded(wanted: Sequence[Picture], encode: Encode, fetcher: PictureFetcher) -> dict[str, EncodedPicture]:
    seen: dict[str, EncodedPicture] = {}
    for picture in wanted:
        try:
            encoding = (
                fetcher.encoded(picture.url, picture.called, encode)
                if picture.url
                else encode(picture.data, picture.called)
            )
            seen[picture.digest] = await encoding
        except EngineError as exc:
            raise RequestError(f"{picture.called}: {exc}", code="no_pictures", param=picture.called) from exc
        _check_bytes(sum(each.content_bytes for each in seen.values()), picture.called)
    return seen


def _with_content(made: _Made, seen: dict[str, EncodedPicture]) -> _Made:
    """Add the pictures' embeddings to the job of ``made``, if it has one: preparing it needed only their token ids."""
    job: Job | None = getattr(made, "job", None)
    if job is None:
        return made
    for prompt in job.prompts:
        _check_bytes(_prompt_bytes(prompt, seen), "messages")
    return msgspec.structs.replace(made, job=msgspec.structs.replace(job, seen=seen))


def _prompt_bytes(prompt: Prompt, seen: Mapping[str, EncodedPicture]) -> int:
    return sum(seen[place.digest].content_bytes for place in prompt.pictures)


def _check_bytes(size: int, called: str) -> None:
    if size > MAX_CONTENT_BYTES:
        raise RequestError(
            f"{called}: with the images before it, it needs more than {show_bytes(MAX_CONTENT_BYTES)} of embeddings; "
            "send fewer or smaller images",
            code="too_many_pictures",
            param=called,
        )
