"""RoPE parameters that override the model's: llama.cpp's parameters of a context.

All devices of a ring use the same ones. They are part of what a ring process has loaded, and of the keys of KV blocks.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, get_args

import msgspec
from msgspec import Meta

RopeScaling = Literal["none", "linear", "yarn", "longrope"]
ROPE_SCALINGS: Final[tuple[RopeScaling, ...]] = get_args(RopeScaling)
"""In llama.cpp's order (``llama_rope_scaling_type``)."""
MAX: Final = 1e12
_Positive = Annotated[float, Meta(ge=0, le=MAX)]
_Factor = Annotated[float, Meta(ge=-1, le=MAX)]


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """RoPE parameters under llama.cpp's names. The defaults leave everything to the model."""

    scaling: RopeScaling | None = None
    freq_base: _Positive = 0.0
    freq_scale: _Positive = 0.0
    yarn_ext_factor: _Factor = -1.0
    yarn_attn_factor: _Factor = -1.0
    yarn_beta_fast: _Factor = -1.0
    yarn_beta_slow: _Factor = -1.0
    yarn_orig_ctx: Annotated[int, Meta(ge=0, le=1 << 26)] = 0

    @property
    def is_changed(self) -> bool:
        """Whether anything differs from the model."""
        return self != AS_IN_THE_MODEL

    def reach(self, trained_tokens: int, original_tokens: int) -> int:
        """Return the longest context; 0 where it is not known, as with another base.

        ``trained_tokens`` is the model's own, stretched from ``original_tokens`` if its file says so.
        """
        if self.freq_base:
            return 0
        if not self.freq_scale or self.scaling == "none":
            return trained_tokens
        return max(trained_tokens, int((self.yarn_orig_ctx or original_tokens) / self.freq_scale))


AS_IN_THE_MODEL: Final = Rope()
