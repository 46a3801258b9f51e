"""Turns a request's fields into the sampling of its responses. Pure.

The default of a field is the model file's (``general.sampling.*``), else llama.cpp's. Penalties cover the last 64
tokens by default; -1, or more than the context, means all of it.
"""

from __future__ import annotations

import math
from typing import Any, Final

from primad.api.answering.backend import TextModel, Vocabulary
from primad.api.answering.grammar import of_schema, of_text
from primad.api.answering.job import SEEDS
from primad.api.dialects.openai.sampler_order import in_order
from primad.api.dialects.openai.samplers import SamplerFields
from primad.engine.protocol import packed_biases
from primad.errors import RequestError, printable
from primad.ring.messages import GREEDY, Sampling

BREAKERS: Final = ("\n", ":", '"', "*")
"""Texts at which DRY lets a repetition restart, as in llama.cpp."""
MAX_BIAS_TEXTS: Final = 1024
MAX_BIAS_CHARS: Final = 16 << 10
"""Limit of all texts that have a bias: each takes llama.cpp's pre-tokenizers 0.1 to 1 ms; 50,000 took 14 s."""


def first_seed(request: SamplerFields, random: int) -> int:
    """Return the seed of a request's first choice: its own, or ``random`` if it has none (or -1)."""
    return random if request.seed is None or request.seed == -1 else request.seed


def sampling_of(request: SamplerFields, served: TextModel, *, seed: int, grammar: str | None) -> Sampling:
    """Return the sampling of ``request`` for ``served``; the response must match ``grammar``.

    Raises ``RequestError`` (400) for a bias on an invalid token, and for an order of samplers that would change the
    result.
    """
    usual = served.sampling

    def given(value: Any, default: Any) -> Any:
        return default if value is None else value

    def reach(tokens: int) -> int:
        return served.context_tokens if tokens == -1 else min(tokens, served.context_tokens)

    sampling = Sampling(
        temperature=given(request.temperature, usual.temperature),
        top_k=max(0, given(request.top_k, usual.top_k)),
        top_p=given(request.top_p, usual.top_p),
        min_p=given(request.min_p, usual.min_p),
        seed=seed % SEEDS,
        presence_penalty=given(request.presence_penalty, 0.0),
        frequency_penalty=given(request.frequency_penalty, 0.0),
        repeat_penalty=given(request.repeat_penalty, usual.repeat_penalty),
        penalty_tokens=reach(given(request.repeat_last_n, usual.penalty_tokens)),
        logit_bias=_logit_bias(request.logit_bias or {}, served.vocabulary, request.MAX_BIAS),
        top_n_sigma=max(0.0, given(request.top_n_sigma, 0.0)),
        typical_p=given(request.typical_p, 1.0),
        temperature_range=given(request.dynatemp_range, 0.0),
        temperature_exponent=given(request.dynatemp_exponent, 1.0),
        mirostat=given(request.mirostat, usual.mirostat),
        mirostat_tau=given(request.mirostat_tau, usual.mirostat_tau),
        mirostat_eta=given(request.mirostat_eta, usual.mirostat_eta),
        dry_multiplier=given(request.dry_multiplier, 0.0),
        dry_base=given(request.dry_base, GREEDY.dry_base),
        dry_allowed_length=given(request.dry_allowed_length, GREEDY.dry_allowed_length),
        dry_tokens=reach(given(request.dry_penalty_last_n, -1)) if request.dry_multiplier else 0,
        dry_breakers=tuple(given(request.dry_sequence_breakers, BREAKERS)),
        xtc_probability=given(request.xtc_probability, usual.xtc_probability),
        xtc_threshold=given(request.xtc_threshold, usual.xtc_threshold),
        min_tokens=given(request.min_tokens, 0),
        ignore_eos=bool(request.ignore_eos),
        grammar=grammar,
    )
    return sampling if request.samplers is None else in_order(sampling, request.samplers)


def grammar_of(request: SamplerFields) -> str | None:
    """Return the required form of the response to ``request``, None for any text.

    Raises ``RequestError`` (400) for an unsupported form, and if several are given.
    """
    found: list[tuple[str, Any]] = []
    wanted = request.response_format
    if wanted is not None and wanted.type == "json_object":
        found.append(("response_format", {"type": "object"} if wanted.schema_ is None else wanted.schema_))
    elif wanted is not None and wanted.type == "json_schema":
        inner = wanted.json_schema.schema_ if wanted.json_schema is not None else wanted.schema_
        if inner is None:
            raise RequestError(
                "'response_format.json_schema.schema' is required",
                param="response_format",
                code="missing_required_parameter",
            )
        found.append(("response_format", inner))
    if request.json_schema is not None:
        found.append(("json_schema", request.json_schema))
    if request.grammar:
        found.append(("grammar", request.grammar))
    if len(found) > 1:
        names = " and ".join(f"'{name}'" for name, _ in found)
        raise RequestError(
            f"{names} both constrain the response; use one of them", param=found[1][0], code="invalid_value"
        )
    if not found:
        return None
    name, what = found[0]
    return of_text(what, param=name) if name == "grammar" else of_schema(what, param=name)


def _logit_bias(
    biases: dict[str, float | bool] | list[list[int | str | float | bool]], vocabulary: Vocabulary, maximum: float
) -> bytes:
    pairs = biases.items() if isinstance(biases, dict) else [(pair[0], pair[1]) for pair in biases]
    by_token: dict[int, float] = {}
    texts = [key for key, _ in pairs if isinstance(key, str) and not _is_id(key)]
    if len(texts) > MAX_BIAS_TEXTS or sum(map(len, texts)) > MAX_BIAS_CHARS:
        raise _bad_bias(f"at most {MAX_BIAS_TEXTS} texts of {MAX_BIAS_CHARS} characters together; give token ids")
    for key, bias in pairs:
        if bias is True or isinstance(bias, str) or not -maximum <= bias <= maximum:
            raise _bad_bias(
                f"{str(bias)[:40]!r} is not a bias; they go from -{maximum:.0f} to {maximum:.0f}, or are false"
            )
        for token in _tokens_of(key, vocabulary):
            by_token[token] = -math.inf if bias is False else float(bias)
    return packed_biases(sorted(by_token.items()))


def _tokens_of(key: int | str | float | bool, vocabulary: Vocabulary) -> list[int]:
    """Return the tokens of ``key``: an id, as a number or in digits, or a text. A text that is a number is an error."""
    if isinstance(key, str) and not _is_id(key):
        if not key or _is_number(key):
            raise _bad_bias(f"{printable(key, 40)!r} is neither a token id nor a text")
        return vocabulary.tokenize(key, add_special=False, parse_special=False)
    if isinstance(key, str):
        key = int(key) if len(key) <= 10 else vocabulary.size
    if isinstance(key, bool | float) or not 0 <= key < vocabulary.size:
        raise _bad_bias(f"{str(key)[:40]!r} is not a token id; they go from 0 to {vocabulary.size - 1}")
    return [key]


def _is_id(key: str) -> bool:
    return key.isascii() and key.isdigit()


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _bad_bias(why: str) -> RequestError:
    return RequestError(f"'logit_bias': {why}", param="logit_bias", code="invalid_value")
