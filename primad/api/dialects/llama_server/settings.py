"""The sampling settings of a response, under llama-server's names. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from primad.api.dialects.openai.sampler_order import SAMPLERS
from primad.engine.protocol import biases_in
from primad.ring.messages import Sampling


class Bias(msgspec.Struct, frozen=True, kw_only=True):
    """The bias added to a token's logit; None: the token never occurs, since JSON has no infinity."""

    token: int
    bias: float | None


class GenerationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The requested settings, and the defaults. The names are llama-server's; settings that primad does not offer have
    llama-server's value for "off"."""

    n_ctx: int
    model: str
    seed: int
    temperature: float
    dynatemp_range: float
    dynatemp_exponent: float
    top_k: int
    top_p: float
    min_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    typical_p: float
    repeat_last_n: int
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: list[str]
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    stop: list[str]
    max_tokens: int
    n_predict: int
    n_keep: int = 0
    n_discard: int = 0
    ignore_eos: bool
    stream: bool
    logit_bias: list[Bias]
    n_probs: int
    min_keep: int = 0
    grammar: str
    grammar_lazy: bool = False
    samplers: list[str]
    timings_per_token: bool
    post_sampling_probs: bool = False
    lora: list[Any] = []


_SAME: Final = (
    *("seed", "temperature", "top_k", "top_p", "min_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "typical_p"),
    *("repeat_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base", "dry_allowed_length"),
    *("mirostat", "mirostat_tau", "mirostat_eta", "ignore_eos"),
)


def settings_of(
    sampling: Sampling,
    *,
    n_ctx: int,
    model: str,
    n_predict: int = -1,
    stops: tuple[str, ...] = (),
    stream: bool = False,
    n_probs: int = 0,
    times_parts: bool = False,
) -> GenerationSettings:
    """Return the settings of ``sampling`` and the other options; ``n_predict`` -1: as many tokens as fit."""
    return GenerationSettings(
        **{name: getattr(sampling, name) for name in _SAME},
        n_ctx=n_ctx,
        model=model,
        dynatemp_range=sampling.temperature_range,
        dynatemp_exponent=sampling.temperature_exponent,
        repeat_last_n=sampling.penalty_tokens,
        dry_penalty_last_n=sampling.dry_tokens,
        dry_sequence_breakers=list(sampling.dry_breakers),
        stop=list(stops),
        max_tokens=n_predict,
        n_predict=n_predict,
        stream=stream,
        logit_bias=[
            Bias(token=token, bias=bias if bias > float("-inf") else None)
            for token, bias in biases_in(sampling.logit_bias)
        ],
        n_probs=n_probs,
        grammar=sampling.grammar or "",
        samplers=list(SAMPLERS),
        timings_per_token=times_parts,
    )
