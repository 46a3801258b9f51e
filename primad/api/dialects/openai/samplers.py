"""Sampling fields of a request: OpenAI's fields, and those of llama.cpp's server."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, AliasChoices, Field
from pydantic_core import PydanticCustomError

from primad.api.dialects.openai.fields import Strict, expecting, only

MAX_TOKENS: Final = 2**31 - 1
MAX_SAMPLERS: Final = 64
MAX_BREAKERS: Final = 16
MAX_BREAKER_CHARS: Final = 40
MAX_BREAKERS_CHARS: Final = 128
"""Limit of all breakers together: llama.cpp searches the vocabulary for each of them, which takes longer for long ones.
"""

_Count = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
_Reach = Annotated[int, Field(ge=-1, le=MAX_TOKENS)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Bias = Annotated[float, Field(ge=-100, le=100)] | Literal[False]
_Breaker = Annotated[str, Field(min_length=1, max_length=MAX_BREAKER_CHARS)]
_BiasPair = Annotated[list[int | str | float | bool], Field(min_length=2, max_length=2)]
_Unguided = Annotated[Any, only(None, why="use response_format, json_schema or grammar")]
_NoStops = Annotated[Any, only(None, [], why="use stop or logit_bias")]


def _few_chars(breakers: list[str]) -> list[str]:
    if sum(map(len, breakers)) > MAX_BREAKERS_CHARS:
        raise PydanticCustomError("length", "expected at most {most} characters together", {"most": MAX_BREAKERS_CHARS})
    return breakers


class NamedSchema(Strict):
    """A JSON schema in OpenAI's wrapper. It is always followed strictly, whatever ``strict`` is."""

    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """The required form of the response. ``schema`` with ``json_object`` is the form of llama.cpp's server."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class SamplerFields(Strict):
    """How the next token is chosen. A missing field has the model file's value, else the default of most clients."""

    MAX_BIAS: ClassVar[float] = 100

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: _Share | None = None
    top_k: _Reach | None = None
    min_p: _Share | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = Field(
        default=None, validation_alias=AliasChoices("repeat_penalty", "repetition_penalty")
    )
    repeat_last_n: _Reach | None = None
    logit_bias: Annotated[
        dict[str, _Bias] | list[_BiasPair] | None,
        expecting(
            "token ids or texts with numbers from -100 to 100, or false for never: an object, or a list of pairs",
        ),
    ] = None
    top_n_sigma: Annotated[float, Field(ge=-1, le=1000)] | None = None
    typical_p: _Share | None = None
    dynatemp_range: Annotated[float, Field(ge=0, le=2)] | None = None
    dynatemp_exponent: Annotated[float, Field(ge=0, le=100)] | None = None
    mirostat: Literal[0, 1, 2] | None = None
    mirostat_tau: Annotated[float, Field(ge=0, le=100)] | None = None
    mirostat_eta: _Share | None = None
    dry_multiplier: Annotated[float, Field(ge=0, le=100)] | None = None
    dry_base: Annotated[float, Field(ge=0, le=100)] | None = None
    dry_allowed_length: _Count | None = None
    dry_penalty_last_n: _Reach | None = None
    dry_sequence_breakers: (
        Annotated[list[_Breaker], Field(max_length=MAX_BREAKERS), AfterValidator(_few_chars)] | None
    ) = None
    xtc_probability: _Share | None = None
    xtc_threshold: _Share | None = None
    min_tokens: _Count | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    cache_prompt: bool | None = None
    speculate: bool | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    id_slot: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    t_max_predict_ms: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    samplers: Annotated[
        Annotated[str, Field(max_length=MAX_SAMPLERS)]
        | Annotated[list[Annotated[str, Field(max_length=MAX_SAMPLERS)]], Field(max_length=MAX_SAMPLERS)]
        | None,
        expecting("a list of samplers' names, or llama.cpp's letters for them"),
    ] = None
    grammar_lazy: Annotated[Any, only(None, False, why="a grammar applies from the first token")] = None
    lora: Annotated[Any, only(None, [], why="the model is served as its file is")] = None
    guided_json: _Unguided = None
    guided_grammar: _Unguided = None
    guided_regex: _Unguided = None
    guided_choice: _Unguided = None
    structured_outputs: _Unguided = None
    bad_words: _NoStops = None
    stop_token_ids: _NoStops = None
    allowed_token_ids: _NoStops = None
    use_beam_search: Annotated[Any, only(None, False, why="tokens are sampled one after another")] = None
