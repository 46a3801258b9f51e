"""How the answer to a chat is read: what calls and thoughts look like in it, and which are looked for. Pure."""

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
"""The name that leaves it to the chat template in which form a model calls."""
PARSERS: Final = (AUTO, *FORMS)
"""What a form of calls can be named."""
_GENERIC: Final = "hermes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How a model calls functions and thinks (None: it does not). ``asked`` is the form in which it calls when it is told
    the form, or when a call is demanded: its own where that can be bound token by token."""

    form: ToolForm
    asked: ToolForm
    thinking: Thinking | None

    @property
    def is_thinking(self) -> bool:
        """Whether answers have thoughts."""
        return self.thinking is not None or self.form.has_thoughts

    @property
    def call_form(self) -> CallForm:
        """The form of ``asked``."""
        return self.asked.call_form or HERMES


@lru_cache(maxsize=4)
def manner_of(template: str | None, parser: str) -> Manner:
    """What ``template``, a model file's, shows; ``parser`` names the form of its calls, or is ``AUTO``."""
    source = template or CHATML
    form = form_of(source) if parser == AUTO else FORMS[parser]
    return Manner(form=form, asked=form if form.call_form else FORMS[_GENERIC], thinking=thinks(source))


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionReading:
    """What is looked for in an answer: calls of ``functions`` in the form that is called so (None: none), more than one if
    ``several``, and thoughts, in which the prompt may have ``opened`` the answer. With ``shows_control`` control tokens are
    part of its text, with ``keeps_thoughts`` thoughts are that a form's own reader finds. One that ``continues`` begins in
    the middle of a text.
    """

    form: str | None
    thinking: Thinking | None
    opened: bool
    functions: dict[str, dict[str, Any] | None]
    several: bool
    shows_control: bool
    keeps_thoughts: bool = False
    continues: bool = False

    def reader(self) -> StepReader:
        """A reader of one answer."""
        form = None if self.form is None else FORMS[str(self.form)]
        if form is not None and form.reader is not None:
            return form.reader(self.functions, self.keeps_thoughts, self.continues)
        return Reader(form, self.thinking, opened=self.opened, functions=self.functions)
