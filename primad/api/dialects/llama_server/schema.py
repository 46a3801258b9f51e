"""Requests of llama-server's own paths, as in its documentation. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field

from primad.api.answering.fill_in import Gap
from primad.api.answering.pictures import PromptTokens
from primad.api.dialects.openai.chat_fields import ChatFields
from primad.api.dialects.openai.fields import Strict, expecting, only
from primad.api.dialects.openai.free_samplers import FreeSamplers, Whole
from primad.api.dialects.openai.samplers import MAX_TOKENS
from primad.api.dialects.openai.schema import CompletionRequest

MAX_FILES: Final = 256
MAX_PROBS: Final = 100
_TokenId = Annotated[int, Field(ge=0, le=MAX_TOKENS)]


class SeenPrompt(Strict):
    """A prompt with images as base64, one for each marker in its text."""

    prompt_string: str
    multimodal_data: Annotated[list[str], Field(default_factory=list, fail_fast=True)]


class TokenizeRequest(Strict):
    """``POST /tokenize``."""

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(Strict):
    """``POST /detokenize``."""

    tokens: Annotated[list[_TokenId], Field(fail_fast=True)]


class TemplateRequest(ChatFields):
    """``POST /apply-template``."""


class RawCompletionRequest(FreeSamplers, CompletionRequest):
    """``POST /completion``: samplers as in OpenAI's dialect without its bounds, the rest as in llama-server."""

    prompt: Annotated[  # type: ignore[assignment]
        str
        | SeenPrompt
        | Annotated[
            list[_TokenId | str | SeenPrompt | Annotated[list[_TokenId | str], Field(min_length=1, fail_fast=True)]],
            Field(min_length=1, fail_fast=True),
        ],
        expecting(
            "a string, a list of token ids and strings that make one prompt, an object with prompt_string and "
            "multimodal_data, or a list of such prompts or of strings",
        ),
    ]
    n_predict: Annotated[int, Whole, Field(ge=-2, le=MAX_TOKENS)] | None = None
    n_probs: Annotated[int, Whole, Field(ge=0, le=MAX_PROBS)] | None = None
    post_sampling_probs: Annotated[Any, only(None, False, why="probabilities are the model's own")] = None
    logprobs: Annotated[Any, only(None, why="use n_probs, or /v1/completions")] = None
    response_fields: Annotated[list[Annotated[str, Field(max_length=128)]], Field(max_length=64)] | None = None

    @property
    def token_limit(self) -> int | None:
        """The limit of a response's tokens, or None for the rest of the context; 0: only compute the prompt, for the
        cache."""
        limit = self.max_tokens if self.n_predict is None else self.n_predict
        return None if limit is None or limit < 0 else limit

    @property
    def mixed_prompts(self) -> list[str | SeenPrompt | PromptTokens | list[int | str | SeenPrompt]]:
        """The single prompts: each a text, or a mix of ids and texts. Strings alone are one prompt each."""
        whole: Any = self.prompt
        if isinstance(whole, str | SeenPrompt | PromptTokens):
            return [whole]
        is_one = not any(isinstance(part, list) for part in whole) and any(isinstance(part, int) for part in whole)
        return [whole] if is_one else [[part] if isinstance(part, int) else part for part in whole]

    @property
    def prompts(self) -> list[str | list[int] | PromptTokens]:
        """The single prompts; those that mixed ids and texts, or had pictures, are already converted to ids."""
        return self.mixed_prompts  # type: ignore[return-value]

    @property
    def logprob_count(self) -> int | None:
        """The number of alternatives per token, or None without log-probabilities."""
        return self.n_probs or None


class ExtraFile(Strict):
    """Another file next to the one with the gap."""

    filename: str = "file"
    text: str


class InfillRequest(RawCompletionRequest):
    """``POST /infill``: fill between ``input_prefix``, followed by ``prompt``, and ``input_suffix``."""

    prompt: str = ""
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], Field(max_length=MAX_FILES, fail_fast=True)] | None = None

    @property
    def gap(self) -> Gap:
        """The gap to fill."""
        files = tuple((file.filename, file.text) for file in self.input_extra or ())
        return Gap(after=self.input_suffix, param="input_suffix", files=files)

    @property
    def prompts(self) -> list[str | list[int] | PromptTokens]:
        """The text before the gap, as the only prompt."""
        return [self.input_prefix + self.prompt]
