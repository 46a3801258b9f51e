"""What a request may say to the model's own chat template beside the messages."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from primad.api.dialects.openai.fields import Strict
from primad.api.dialects.openai.thinking_fields import thinking_variables

MAX_DOCUMENTS: Final = 128
MAX_TEMPLATE_VARIABLES: Final = 32
_OURS: Final = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "bos_token",
        "eos_token",
        "strftime_now",
        "raise_exception",
    }
)
"""What the template is given by the server, which a request cannot replace."""


class TemplateFields(Strict):
    """Variables of the chat template. What a template does not mention changes nothing."""

    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_VARIABLES)] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Annotated[str, Field(min_length=1, max_length=32)] | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS)] | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _none_of_ours(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in sorted(_OURS.intersection(value or ())):
            raise PydanticCustomError("reserved", "'{name}' is what the server gives; leave it out", {"name": name})
        return value

    def variables_for(self, template: str) -> dict[str, Any]:
        """The variables of ``template``, by its own names. ``chat_template_kwargs`` is nearest to it: the last word."""
        said = thinking_variables(template, self.enable_thinking, self.reasoning_effort)
        documents = {} if self.documents is None else {"documents": self.documents}
        return said | documents | (self.chat_template_kwargs or {})
