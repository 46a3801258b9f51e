"""Decides how the response to a chat is read: the forms of calls and thoughts, and which of them are detected. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from primad.api.answering.calls.choose import Thinking, form_of, thinks
from primad.api.answering.calls.form import ToolForm
from primad.api.answering.calls.forms import FORMS
from primad.api.answering.calls.reader import Reader
from primad.api.answering.calls.steps import StepReader
from primad.api.answering.chat import CHATML
from primad.api.answering.grammar import HERMES, CallForm

AUTO: Final = "auto"
"""The name for taking the call format from the chat template."""
PARSERS: Final = (AUTO, *FORMS)
"""Names of call formats."""
_GENERIC: Final = "hermes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How a model calls functions and thinks (None: it does not think). ``asked`` is the format the model is asked to
    use if its template has none, or if a call is demanded: its own format if that can be constrained token by token."""

    form: ToolForm
    asked: ToolForm
    thinking: Thinking | None

    @property
    def is_thinking(self) -> bool:
        """Whether responses have thoughts."""
        return self.thinking is not None or self.form.has_thoughts

    @property
    def call_form(self) -> CallForm:
        """The format of ``asked``."""
        return self.asked.call_form or HERMES


@lru_cache(maxsize=4)
def manner_of(template: str | None, parser: str) -> Manner:
    """Return the formats that ``template`` of a model file shows; ``parser`` names the call format, or is ``AUTO``."""
    source = template or CHATML
    form = form_of(source) if parser == AUTO else FORMS[parser]
    return Manner(form=form, asked=form if form.call_form else FORMS[_GENERIC], thinking=thinks(source))


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionReading:
    """What to detect in a response: calls of ``functions`` in the format of that name (None: no calls), more than one
    if ``several``; and thoughts, if the prompt ``opened`` them. With ``shows_control`` control tokens are part of the
    text; with ``keeps_thoughts`` so are thoughts found by a format's own reader. With ``continues`` the response starts
    in the middle of a text."""

    form: str | None
    thinking: Thinking | None
    opened: bool
    functions: dict[str, dict[str, Any] | None]
    several: bool
    shows_control: bool
    keeps_thoughts: bool = False
    continues: bool = False

    def reader(self) -> StepReader:
        """Return a reader of one response."""
        form = None if self.form is None else FORMS[str(self.form)]
        if form is not None and form.reader is not None:
            return form.reader(self.functions, self.keeps_thoughts, self.continues)
        return Reader(form, self.thinking, opened=self.opened, functions=self.functions)
