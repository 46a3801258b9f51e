"""A model's capabilities, in the words of Ollama and llama-server."""

from __future__ import annotations

from primad.api.answering.backend import ServedModel
from primad.api.answering.chat import CHATML
from primad.api.answering.models import OfferedModel
from primad.api.answering.reading import manner_of
from primad.api.answering.tool_prompt import mentions


def capabilities(served: ServedModel) -> list[str]:
    """Return the capabilities of a served model, from its chat template."""
    template = served.vocabulary.chat_template or CHATML
    thinks = manner_of(template, served.tool_parser).is_thinking
    has = {"tools": mentions(template, "tools"), "thinking": thinks, "vision": served.sees, "audio": served.hears}
    return ["completion", *(name for name, is_there in has.items() if is_there)]


def capabilities_of(model: OfferedModel, served: ServedModel | None) -> list[str]:
    """Return the capabilities of an offered model; if it is not ``served``, its template is unknown and only its kind
    counts."""
    if model.embeds:
        return ["embedding"]
    if served is not None:
        return capabilities(served)
    has = {"vision": model.sees, "audio": model.hears}
    return ["completion", *(name for name, is_there in has.items() if is_there)]
