"""Prepares the requests of llama-server's own dialect in the text process. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from primad.api.answering.backend import Asking, TextModel, Vocabulary
from primad.api.answering.job import Job, check_tokens
from primad.api.answering.pictures import (
    KnownPicture,
    PromptTokens,
    SentPicture,
    known_pictures,
    marker_of,
    tokens_with_pictures,
    without_markers,
)
from primad.api.dialects.llama_server.schema import (
    DetokenizeRequest,
    InfillRequest,
    RawCompletionRequest,
    SeenPrompt,
    TemplateRequest,
    TokenizeRequest,
)
from primad.api.dialects.llama_server.settings import GenerationSettings, settings_of
from primad.api.dialects.openai.job import completion_job
from primad.api.dialects.openai.schema import MAX_ECHO_CHARS, parse
from primad.api.dialects.openai.tool_use import chat_text
from primad.errors import RequestError

MARKER: Final = "<__media__>"
"""Represents a picture in the text of a prompt."""
MAX_SETTINGS_CHARS: Final = 256 << 10
"""Limit of the settings in all responses to a request: 128 choices with a bias for each token were 150 MB, which the
event loop had to make."""


class PreparedRaw(msgspec.Struct, frozen=True, kw_only=True):
    """A job, and the form of its response for a client that calls the model ``model``; ``fields`` selects fields of the
    response, empty for all."""

    job: Job
    model: str
    stream: bool
    times_parts: bool
    fields: list[str]
    prompts: list[str]
    """The text of each of the job's prompts, control tokens by their names; "" if all of them together are too long."""
    settings: GenerationSettings
    """The settings of the first choice, without lists and texts if those are too long for all choices together."""


class WholeBody(msgspec.Struct, frozen=True, kw_only=True):
    """The response, as the JSON to send."""

    body: bytes


class TokenList(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /tokenize``: ids, or with pieces objects of ``id`` and ``piece`` (text, or bytes if it is not text)."""

    tokens: list[Any]


class DetokenizedText(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /detokenize``."""

    content: str


class TemplatedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /apply-template``."""

    prompt: str


def completion(body: bytes, asking: Asking) -> PreparedRaw:
    """``POST /completion``."""
    return _prepared(_with_ids(parse(RawCompletionRequest, body), asking.served), asking)


def infill(body: bytes, asking: Asking) -> PreparedRaw:
    """``POST /infill``."""
    return _prepared(parse(InfillRequest, body), asking)


def _prepared(ask: RawCompletionRequest, asking: Asking) -> PreparedRaw:
    served, model = asking.served, ask.model or asking.served.id
    job = completion_job(ask, served, seed=asking.seed)
    prompts = [_shown_text(prompt.tokens, served.vocabulary) for prompt in job.prompts]
    settings = settings_of(
        job.sampling,
        n_ctx=served.context_tokens,
        model=model,
        n_predict=-1 if ask.token_limit is None else ask.token_limit,
        stops=job.stops,
        stream=bool(ask.stream),
        n_probs=ask.n_probs or 0,
        times_parts=bool(ask.timings_per_token),
    )
    return PreparedRaw(
        job=job,
        model=model,
        stream=bool(ask.stream),
        times_parts=bool(ask.timings_per_token),
        fields=[name for name in ask.response_fields or () if name],
        prompts=prompts if job.n * sum(map(len, prompts)) <= MAX_ECHO_CHARS else [""] * len(prompts),
        settings=_short(settings, job.n * len(prompts)),
    )


def _short(settings: GenerationSettings, choices: int) -> GenerationSettings:
    """Return ``settings`` as the responses of all ``choices`` can have them: each response repeats what the client sent
    once."""
    if len(msgspec.json.encode(settings)) * choices <= MAX_SETTINGS_CHARS:
        return settings
    return msgspec.structs.replace(settings, logit_bias=[], grammar="", stop=[], dry_sequence_breakers=[])


def _with_ids(ask: RawCompletionRequest, served: TextModel) -> RawCompletionRequest:
    """Return ``ask`` with prompts that mix ids and texts, or have pictures, converted to ids."""
    places = [
        (f"prompt[{number}]" if isinstance(ask.prompt, list) else "prompt", each)
        for number, each in enumerate(ask.mixed_prompts)
    ]
    known = known_pictures(
        [sent for at, each in places if isinstance(each, SeenPrompt) for sent in _sent(each, at)], served
    )
    prompts: list[Any] = []
    for at, each in places:
        match each:
            case str():
                prompts.append(each)
            case SeenPrompt():
                prompts.append(_with_pictures(each, known, served, at))
            case list():
                prompts.append(_ids(each, served, at))
            case PromptTokens():
                raise AssertionError("nothing is ids yet")
    return ask.model_copy(update={"prompt": prompts[0] if len(prompts) == 1 else prompts})


def _sent(prompt: SeenPrompt, at: str) -> list[SentPicture]:
    """Return the pictures of ``prompt``, each with a marker in its text."""
    markers, pictures = prompt.prompt_string.count(MARKER), len(prompt.multimodal_data)
    if markers != pictures:
        raise RequestError(
            f"'{at}' has {markers} markers {MARKER} in its text, and {pictures} images; it needs one for each",
            param=at,
        )
    return [SentPicture(f"{at}.multimodal_data[{i}]", each, "") for i, each in enumerate(prompt.multimodal_data)]


def _with_pictures(prompt: SeenPrompt, known: Mapping[str, KnownPicture], served: TextModel, at: str) -> PromptTokens:
    first, *others = prompt.prompt_string.split(MARKER)
    text = first + "".join(marker_of(each.source) + rest for each, rest in zip(_sent(prompt, at), others, strict=True))
    return tokens_with_pictures(served.vocabulary, text, known, add_special=True)


def _ids(prompt: list[int | str | SeenPrompt], served: TextModel, at: str) -> list[int]:
    tokens: list[int] = []
    for part in prompt:
        if isinstance(part, SeenPrompt):
            raise RequestError(
                f"'{at}': an object with prompt_string is a separate prompt, without token ids", param=at
            )
        if isinstance(part, str):
            tokens += served.vocabulary.tokenize(part, add_special=not tokens, parse_special=True)
        else:
            tokens.append(part)
    return tokens


def tokenize(body: bytes, asking: Asking) -> WholeBody:
    """``POST /tokenize``."""
    vocabulary, ask = asking.served.vocabulary, parse(TokenizeRequest, body)
    tokens = vocabulary.tokenize(ask.content, add_special=ask.add_special, parse_special=ask.parse_special)
    return _whole(TokenList(tokens=pieces(tokens, vocabulary) if ask.with_pieces else tokens))


def detokenize(body: bytes, asking: Asking) -> WholeBody:
    """``POST /detokenize``: control tokens by their names."""
    vocabulary, ask = asking.served.vocabulary, parse(DetokenizeRequest, body)
    check_tokens(ask.tokens, vocabulary, at="tokens")
    return _whole(DetokenizedText(content=_shown_text(ask.tokens, vocabulary)))


def _shown_text(tokens: list[int], vocabulary: Vocabulary) -> str:
    """Return the text of ``tokens``, control tokens by their names; embeddings of pictures have no text."""
    shown = (vocabulary.piece(token) or vocabulary.name(token).encode() for token in tokens if token >= 0)
    return b"".join(shown).decode("utf-8", "replace")


def apply_template(body: bytes, asking: Asking) -> WholeBody:
    """``POST /apply-template``: the prompt that the model's template makes of the messages."""
    ask = parse(TemplateRequest, body)
    markers = {marker_of(each.source): each for each in ask.pictures}
    prompt = chat_text(ask, asking.served, now=asking.now)
    return _whole(TemplatedPrompt(prompt=without_markers(prompt, markers, MARKER)))


def _whole(response: msgspec.Struct) -> WholeBody:
    return WholeBody(body=msgspec.json.encode(response))


def pieces(tokens: list[int], vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Return each token with its text, or with its bytes if they are not valid text."""
    return [{"id": token, "piece": _text_or_bytes(vocabulary.piece(token))} for token in tokens]


def _text_or_bytes(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
