"""A strict fake of the backend that the daemon gives to the HTTP API, with a toy vocabulary of one token per byte."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, get_type_hints

import msgspec

from primad.api.answering.backend import (
    FillInTokens,
    Health,
    ModelSettings,
    Preparation,
    Prepared,
    ServedModel,
    Vocabulary,
)
from primad.api.answering.pictures import PicturesWantedError
from primad.engine.pictures.messages import EmbeddedRun, EncodedPicture, TokenRun
from primad.engine.pictures.sounds import is_sound
from primad.engine.protocol import biases_in
from primad.errors import RequestError
from primad.head.model.fetching import PictureFetcher
from primad.head.model.seeing import prepare_seeing
from primad.head.model.text_messages import Failed, PicturesWanted, Prepare, PreparedRequest, RequestRefused
from primad.head.model.text_process import prepared
from primad.ring.messages import Finished, Generate, GenerationEvent, PromptProgress, Sampled, Sampling
from primad.ring.pictures import PictureRows

BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
SPECIAL = {"<s>": BOS, "</s>": EOS, "<|im_start|>": IM_START, "<|im_end|>": IM_END}
SIZE = 260


@dataclass(frozen=True)
class ByteVocabulary:
    """Tokens 0 to 255 are bytes; four special tokens follow."""

    chat_template: str | None = None
    bos: str = "<s>"
    eos: str = "</s>"
    adds_bos: bool = True
    fill_in: FillInTokens | None = None

    @property
    def size(self) -> int:
        return SIZE

    @property
    def longest_chars(self) -> int:
        return max(map(len, SPECIAL))

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        tokens = [BOS] if add_special and self.adds_bos else []
        while text:
            name = next((name for name in SPECIAL if parse_special and text.startswith(name)), None)
            if name is not None:
                tokens.append(SPECIAL[name])
                text = text[len(name) :]
            else:
                tokens += text[0].encode()
                text = text[1:]
        return tokens

    def piece(self, token: int) -> bytes:
        assert 0 <= token < SIZE, f"token {token} is outside the vocabulary"
        return bytes([token]) if token < 256 else b""

    def piece_or_marker(self, token: int) -> bytes:
        ends = token in (EOS, IM_END)
        return self.piece(token) if token < 256 or ends else self.name(token).encode()

    def name(self, token: int) -> str:
        assert 0 <= token < SIZE, f"token {token} is outside the vocabulary"
        names = {token: name for name, token in SPECIAL.items()}
        return names.get(token, f"<0x{token:02X}>")


@dataclass
class Call:
    """One call of ``generate``: its arguments and how it ended."""

    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    logprobs: int | None
    reuses: bool
    owner: str
    priority: int
    may_expire: bool
    speculates: bool
    pictures: list[PictureRows] = field(default_factory=list)
    sampled: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)


Item = int | PromptProgress | asyncio.Event | Exception
"""A step of a scripted completion: a token to sample, progress of the prompt, an event to wait for, or an exception
to raise."""


class FakeBackend:
    """Serves each call with ``script(call)``; after its last item the model ends the completion."""

    def __init__(
        self,
        script: Callable[[Call], Iterable[Item]],
        *,
        vocabulary: Vocabulary | None = None,
        context_tokens: int = 4096,
    ) -> None:
        self.vocabulary: Vocabulary = vocabulary or ByteVocabulary()
        self.served: ServedModel | None = ServedModel(
            id="toy", created=1_700_000_000, context_tokens=context_tokens, vocabulary=self.vocabulary
        )
        self.state = Health(serving=True, taken=True, detail="serving toy on 1 device")
        self.ending: tuple[str, str | None] = ("stop", None)
        self.ring: dict[str, Any] = {}
        self.drafts = (0, 0)
        """The drafted and accepted tokens of each completion."""
        self.calls: list[Call] = []
        self._script = script
        self.fetcher = PictureFetcher()

    async def prepare(
        self, preparation: Preparation[Prepared], body: bytes, served: ModelSettings | None, *, owner: str = ""
    ) -> Prepared:
        """Runs in this process, but through the wire format. Without a model no images are encoded."""
        if self.served is None:
            return await self._prepared(preparation, body, served, {})
        return await prepare_seeing(lambda seen: self._prepared(preparation, body, served, seen), encoded, self.fetcher)

    async def _prepared(
        self,
        preparation: Preparation[Prepared],
        body: bytes,
        served: ModelSettings | None,
        seen: Mapping[str, Sequence[int]],
    ) -> Prepared:
        assert preparation.__module__.endswith(".prepared"), "the text process does this work"
        task = Prepare(
            what=f"{preparation.__module__}:{preparation.__name__}",
            body=body,
            settings=served,
            seed=secrets.randbelow(2**32 - 1),
            now=datetime.now().astimezone(),
            seen={digest: list(ids) for digest, ids in seen.items()},
        )
        task = msgspec.msgpack.decode(msgspec.msgpack.encode(task), type=Prepare)
        answer = msgspec.msgpack.encode(prepared(task, self.vocabulary))
        match msgspec.msgpack.decode(answer, type=PreparedRequest | PicturesWanted | RequestRefused | Failed):
            case PreparedRequest(made=made, lines=lines):
                for line in lines:
                    logging.getLogger("primad.head.model.text_service").info("%s", line)
                return msgspec.msgpack.decode(made, type=get_type_hints(preparation)["return"])
            case PicturesWanted(pictures=pictures):
                raise PicturesWantedError(pictures)
            case RequestRefused() as refused:
                raise refused.error()
            case Failed(message):
                raise AssertionError(message)

    async def status(self) -> dict[str, Any]:
        return self.ring

    def health(self) -> Health:
        return self.state

    def model(self) -> ServedModel | None:
        return self.served

    async def generate(self, asked: Generate, *, may_expire: bool = True) -> AsyncGenerator[GenerationEvent, None]:
        prompt, max_tokens, sampling, logprobs = asked.prompt, asked.max_tokens, asked.sampling, asked.logprobs
        assert (asked.sampled, asked.blocks, asked.root) == ([], [], ""), "that is the backend's"
        assert self.state.taken, "asked while not serving"
        assert self.served is not None, "asked without a model"
        assert prompt, "the prompt is empty"
        rows = [place for each in asked.pictures for place in range(each.first, each.first + each.rows)]
        assert [place for place, token in enumerate(prompt) if token < 0] == rows, "ids below 0 are rows of pictures"
        assert all(type(token) is int and token < SIZE for token in prompt), "the prompt leaves the vocabulary"
        assert 1 <= max_tokens <= self.served.context_tokens - len(prompt), "the answer does not fit the context"
        assert logprobs is None or 0 <= logprobs <= 100
        check_sampling(sampling, self.served.context_tokens)
        open_calls = sum(not call.closed.is_set() for call in self.calls)
        assert open_calls < self.served.sequences, "one request at a time: the last was not closed"
        call = Call(
            list(prompt),
            max_tokens,
            sampling,
            logprobs,
            asked.reuses,
            asked.owner,
            asked.priority,
            may_expire,
            asked.speculates,
            pictures=asked.pictures,
        )
        self.calls.append(call)
        try:
            async with aclosing(self._answer(call)) as events:
                async for event in events:
                    yield event
        finally:
            call.closed.set()

    async def _answer(self, call: Call) -> AsyncGenerator[GenerationEvent, None]:
        reason, error = self.ending
        for item in self._script(call):
            match item:
                case int():
                    if call.sampled == call.max_tokens:
                        reason = "length"
                        break
                    call.sampled += 1
                    yield sampled(item, call.logprobs)
                case PromptProgress():
                    yield item
                case asyncio.Event():
                    await item.wait()
                case exception:
                    raise exception
        yield Finished(
            request=1,
            reason=reason,
            error=error,
            prompt_tokens=len(call.prompt),
            completion_tokens=call.sampled,
            prompt_s=0.1,
            decode_s=0.2,
            drafted=self.drafts[0],
            accepted=self.drafts[1],
        )


def sampled(token: int, logprobs: int | None = None) -> Sampled:
    """A sampled token of probability 1/2; the alternatives are the tokens after it, each half as likely."""
    if logprobs is None:
        return Sampled(request=1, token=token, logprob=None, top=())
    top = tuple(((token + rank) % SIZE, -0.5 * (rank + 1)) for rank in range(logprobs))
    return Sampled(request=1, token=token, logprob=-0.5, top=top)


def check_sampling(sampling: Sampling, context_tokens: int) -> None:
    """Check that llama.cpp's samplers accept the values, and need no more memory than the context justifies."""
    assert 0 <= sampling.temperature <= 10_000
    assert 0 <= sampling.top_k < 2**31
    assert 0 <= sampling.seed < 2**32 - 1
    for share in (sampling.top_p, sampling.min_p, sampling.typical_p, sampling.mirostat_eta, sampling.xtc_probability):
        assert 0 <= share <= 1
    assert -100 <= sampling.presence_penalty <= 100
    assert -100 <= sampling.frequency_penalty <= 100
    assert 0.01 <= sampling.repeat_penalty <= 100
    assert 0 <= sampling.penalty_tokens <= context_tokens
    assert 0 <= sampling.dry_tokens <= context_tokens
    assert 0 <= sampling.dry_allowed_length < 2**31
    assert 0 <= sampling.dry_base <= 100
    assert 0 <= sampling.dry_multiplier <= 100
    assert 0 <= sampling.temperature_range <= 10_000
    assert 0 <= sampling.temperature_exponent <= 100
    assert 0 <= sampling.top_n_sigma <= 1000
    assert sampling.mirostat in (0, 1, 2)
    assert 0 <= sampling.mirostat_tau <= 100
    assert 0 <= sampling.xtc_threshold <= 1
    assert all(
        0 <= token < SIZE and (bias == -math.inf or -10_000 <= bias <= 10_000)
        for token, bias in biases_in(sampling.logit_bias)
    )


async def encoded(data: bytes, called: str) -> EncodedPicture:
    """An image or audio as four rows of two numbers between two tokens; other data than PNG and audio is refused."""
    if not data.startswith(b"\x89PNG") and not is_sound(data):
        raise RequestError(f"{called}: the image cannot be decoded", param=called)
    rows = EmbeddedRun(rows=4, looks_ahead=True, content=bytes(32))
    digest = hashlib.sha256(data).hexdigest()
    return EncodedPicture(digest=digest, runs=(TokenRun((IM_START,)), rows, TokenRun((IM_END,))))


def replies(*texts: str | bytes | Item) -> Callable[[Call], list[Item]]:
    """A constant script: texts byte by byte, other items as they are."""
    items: list[Item] = []
    for text in texts:
        match text:
            case str():
                items += text.encode()
            case bytes():
                items += text
            case item:
                items.append(item)
    return lambda call: items
