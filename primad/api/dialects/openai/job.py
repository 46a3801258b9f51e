"""Turns a valid request into the work for the served model: prompts as token ids, budgets and sampling. Pure."""

from __future__ import annotations

from datetime import datetime

import numpy as np

from primad.api.answering.backend import TextModel
from primad.api.answering.fill_in import fill_in_prompt
from primad.api.answering.job import Job, Prompt, check_model, check_tokens
from primad.api.answering.pictures import PromptTokens, known_pictures
from primad.api.answering.reading import CompletionReading
from primad.api.dialects.openai.chat_fields import Message, completion_room, shifted
from primad.api.dialects.openai.sampling import first_seed, grammar_of, sampling_of
from primad.api.dialects.openai.schema import MAX_CHOICES, MAX_ECHO_CHARS, ChatRequest, CompletionRequest
from primad.api.dialects.openai.tool_use import chat_text, chat_tokens, completion_rules
from primad.errors import PromptTooLongError, RequestError


def chat_job(
    request: ChatRequest, served: TextModel, *, seed: int, now: datetime, truncates: bool | None = None
) -> Job:
    """Return the work of a chat request. ``seed`` is used if the request has none; ``now`` is the template's clock.

    If it ``truncates``, the oldest messages of a conversation that is too long are dropped; None: only with context
    shift.

    Raises ``RequestError`` for what the served model does not support and ``ModelError`` for a broken chat template.
    """
    check_model(request.model, [served])
    known_pictures(request.pictures, served)  # first, as missing pictures restart the preparation
    maximum = served.context_tokens - completion_room(served.context_tokens, request.token_limit)
    longest = served.vocabulary.longest_chars
    max_chars = None if longest is None else (served.context_tokens - 1) * longest

    def prompt_of(request: ChatRequest) -> tuple[str, PromptTokens | None]:
        """Return the prompt's text, and its tokens; None if it is far too long, however it is tokenized."""
        text = chat_text(request, served, now=now, max_chars=max_chars)
        is_too_long = max_chars is not None and len(text) > max_chars
        return text, None if is_too_long else chat_tokens(request, text, served)

    def fits(messages: list[Message]) -> bool:
        found = prompt_of(request.model_copy(update={"messages": messages}))[1]
        return found is not None and len(found.tokens) <= maximum

    text, prompt = prompt_of(request)
    limit = maximum if served.context_shift else served.context_tokens - 1
    may_drop = served.context_shift if truncates is None else truncates
    if may_drop and (prompt is None or len(prompt.tokens) > limit):
        request = request.model_copy(update={"messages": shifted(request.messages, fits)})
        text, prompt = prompt_of(request)
    if prompt is None:
        check_length(text, served, at="messages")
    assert prompt is not None, "what is too long was refused"
    rules = completion_rules(request, served, text)
    return _job(request, served, [(prompt, "")], grammar=rules.grammar, reading=rules.reading, seed=seed, at="messages")


def completion_job(request: CompletionRequest, served: TextModel, *, seed: int) -> Job:
    """Return the work of a completion request. ``seed`` is used if the request has none.

    Raises ``RequestError`` for what the served model does not support.
    """
    check_model(request.model, [served])
    vocabulary = served.vocabulary
    prompts = list[tuple[PromptTokens, str]]()
    for prompt in request.prompts:
        if isinstance(prompt, PromptTokens):
            prompts.append((prompt, ""))
            continue
        if isinstance(prompt, str):
            if request.gap is None:
                check_length(prompt, served, at="prompt")
            tokens, text = vocabulary.tokenize(prompt, add_special=True, parse_special=True), prompt
        else:
            check_tokens(prompt, vocabulary, at="prompt")
            tokens = prompt
            text = b"".join(map(vocabulary.piece, prompt)).decode("utf-8", "replace") if request.echo else ""
        if request.gap is not None:
            quarter = served.context_tokens // 4
            room = max(served.context_tokens - (request.token_limit or quarter), quarter)
            tokens = fill_in_prompt(vocabulary, prompt, request.gap, room=room)
        prompts.append((PromptTokens(tokens), text if request.echo else ""))
    echoed = (request.n or 1) * sum(len(text) for _, text in prompts)
    if echoed > MAX_ECHO_CHARS:
        raise RequestError(f"echo would return {echoed} characters, more than {MAX_ECHO_CHARS}; lower n", param="echo")
    return _job(request, served, prompts, grammar=grammar_of(request), reading=None, seed=seed, at="prompt")


def _job(
    request: ChatRequest | CompletionRequest,
    served: TextModel,
    prompts: list[tuple[PromptTokens, str]],
    *,
    grammar: str | None,
    reading: CompletionReading | None,
    seed: int,
    at: str,
) -> Job:
    """Return a job of each prompt, with its echo, ``n`` times; ``at`` names the field of the prompts."""
    n = request.n or 1
    if len(prompts) * n > MAX_CHOICES:
        raise RequestError(f"{len(prompts)} prompts with n = {n} are more than {MAX_CHOICES} choices", param="n")
    limit, logprobs, limit_ms = request.token_limit, request.logprob_count, request.t_max_predict_ms or 0
    logprobs = None if logprobs is None else min(logprobs, served.vocabulary.size)
    return Job(
        prompts=tuple(_prompt(tokens, echo, served, limit, at) for tokens, echo in prompts),
        n=n,
        sampling=sampling_of(request, served, seed=first_seed(request, seed), grammar=grammar),
        stops=request.stops,
        logprobs=logprobs,
        reading=reading,
        reports_progress=bool(request.stream and request.return_progress),
        reuses=request.cache_prompt is not False,
        priority=request.priority or 0,
        speculates=request.speculate is not False,
        decode_limit_s=limit_ms / 1000 if limit_ms > 0 else None,
    )


def _prompt(found: PromptTokens, echo: str, served: TextModel, limit: int | None, at: str) -> Prompt:
    room = _room(found.tokens, served, at)
    return Prompt(
        ids=np.array(found.tokens, "<i4").tobytes(),
        max_tokens=room if limit is None else min(limit, room),
        echo=echo,
        pictures=found.pictures,
    )


def _room(prompt: list[int], served: TextModel, at: str) -> int:
    """Return the number of tokens that the context leaves for the response, at least one."""
    if not prompt:
        raise RequestError("the prompt has no tokens", param=at)
    room = served.context_tokens - len(prompt)
    if room < 1:
        raise PromptTooLongError(len(prompt), served.context_tokens, at)
    return room


def check_length(text: str, served: TextModel, *, at: str) -> None:
    """Raise ``PromptTooLongError`` for a ``text`` that cannot fit the context, however it is tokenized."""
    longest = served.vocabulary.longest_chars
    minimum = 0 if longest is None else -(-len(text) // longest)
    if minimum >= served.context_tokens:
        raise PromptTooLongError(minimum, served.context_tokens, at, at_least=True)
