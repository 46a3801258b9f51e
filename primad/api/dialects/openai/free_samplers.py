"""The samplers of the other dialects: every number that llama.cpp accepts, with llama.cpp's meaning.

JSON has one kind of number, so 40.0 is 40. Values below the smallest effective one mean off, as in llama.cpp.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from primad.api.dialects.openai.fields import expecting
from primad.api.dialects.openai.samplers import MAX_TOKENS, SamplerFields

MAX_TEMPERATURE: Final = 10_000
MAX_PENALTY: Final = 100


def is_count(value: object) -> bool:
    """Whether it is a number and not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and math.isfinite(value) else value


def _at_least(minimum: float) -> AfterValidator:
    return AfterValidator(lambda value: max(value, minimum))


Whole: Final = BeforeValidator(_whole)
_Share = Annotated[float, AfterValidator(lambda value: min(max(value, 0.0), 1.0))]
_Count = Annotated[int, Whole, Field(le=MAX_TOKENS), _at_least(0)]
_Reach = Annotated[int, Whole, Field(le=MAX_TOKENS), _at_least(-1)]
_Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
_Repeat = Annotated[float, Field(le=MAX_PENALTY), AfterValidator(lambda value: max(value, 0.01) if value > 0 else 1.0)]
_Bias = Annotated[float, Field(ge=-MAX_TEMPERATURE, le=MAX_TEMPERATURE)] | Literal[False]


class FreeSamplers(SamplerFields):
    """``SamplerFields`` without OpenAI's bounds."""

    MAX_BIAS: ClassVar[float] = MAX_TEMPERATURE

    temperature: Annotated[float, Field(le=MAX_TEMPERATURE), _at_least(0)] | None = None
    top_p: _Share | None = None
    top_k: _Count | None = None
    min_p: _Share | None = None
    seed: Annotated[int, Whole, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repeat_penalty: _Repeat | None = Field(
        default=None, validation_alias=SamplerFields.model_fields["repeat_penalty"].validation_alias
    )
    repeat_last_n: _Reach | None = None
    logit_bias: Annotated[
        dict[str, _Bias] | list[Annotated[list[int | str | float | bool], Field(min_length=2, max_length=2)]] | None,
        expecting("token ids or texts with numbers, or false for never: an object, or a list of pairs"),
    ] = None
    top_n_sigma: Annotated[float, Field(le=1000), _at_least(0)] | None = None
    typical_p: _Share | None = None
    dynatemp_range: Annotated[float, Field(le=MAX_TEMPERATURE), _at_least(0)] | None = None
    mirostat: Annotated[Literal[0, 1, 2], Whole] | None = None
    dry_allowed_length: _Count | None = None
    dry_penalty_last_n: _Reach | None = None
    xtc_probability: _Share | None = None
    xtc_threshold: _Share | None = None
    min_tokens: _Count | None = None
