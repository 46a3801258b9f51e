"""The text process: ``python -m primad.head.model.text_process`` prepares each request's body for the daemon.

Templates and vocabularies come from third-party files, texts and schemas from any client, and the code that reads them
is not hardened: llama.cpp's pre-tokenizers recurse once per character, a template may loop for hours, a schema may grow
without end. So this process may die, hang or grow; the daemon bounds its time and memory (``text_service.py``). It ends
when its standard input ends, whatever it is computing.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Final

import msgspec

from primad.api.answering.any_model import AnyVocabulary
from primad.api.answering.backend import Asking, Preparation, TextModel, Vocabulary
from primad.api.answering.pictures import PicturesWantedError
from primad.api.answering.pieces import CONTROL, END, PieceTable
from primad.errors import EngineError, PrimadError, RequestError
from primad.head.model.text_messages import (
    Failed,
    LoadText,
    PicturesWanted,
    Prepare,
    PreparedRequest,
    PrepareTask,
    RequestRefused,
    TextReady,
    TextReply,
)
from primad.system.children.channel import MAX_FRAME_BYTES
from primad.system.children.reply_stream import answer_tasks

MODULE: Final = "primad.api."
NEEDED: Final = "primad.api.dialects.openai.prepared"
"""The module to import at the start: nearly every request needs it, and none should wait for it."""
MAX_MADE_BYTES: Final = MAX_FRAME_BYTES // 2
MAX_LINES: Final = 8


class _Process:
    def __init__(self) -> None:
        self._vocabulary: Vocabulary = AnyVocabulary()

    def reply(self, task: PrepareTask) -> TextReply:
        match task:
            case LoadText():
                return self._load(task)
            case Prepare():
                return prepared(task, self._vocabulary)

    def _load(self, task: LoadText) -> TextReady | Failed:
        if not task.path:
            import_module(NEEDED)
            _bound_memory(task.memory_bytes)
            return TextReady(pieces=None)
        from primad.head.model.tokenizer import ModelVocabulary  # loads llama.cpp

        try:
            vocabulary = self._vocabulary = ModelVocabulary(task.path, task.chat_template)
        except EngineError as exc:
            return Failed(str(exc))
        pieces = None
        if task.reports_pieces:
            pieces = PieceTable.of(
                (
                    (name, (CONTROL if is_control else 0) | (END if is_end else 0))
                    for name, is_control, is_end in vocabulary.all_tokens()
                ),
                bos=vocabulary.bos,
                eos=vocabulary.eos,
                chat_template=vocabulary.chat_template,
            )
        import_module(NEEDED)
        _ = vocabulary.longest_chars  # loaded before any request waits for it
        _bound_memory(task.memory_bytes)
        return TextReady(pieces=pieces)


def prepared(task: Prepare, vocabulary: Vocabulary) -> PreparedRequest | PicturesWanted | RequestRefused | Failed:
    """Return the reply to ``task``."""
    try:
        with _logged() as lines:
            made = msgspec.msgpack.encode(_preparation(task.what)(task.body, _asking(task, vocabulary)))
        if len(made) > MAX_MADE_BYTES:
            raise RequestError(f"the response would have {len(made)} bytes; ask for less at a time")
        return PreparedRequest(made=made, lines=lines)
    except PicturesWantedError as exc:
        return PicturesWanted(pictures=exc.pictures)
    except PrimadError as exc:
        return RequestRefused.of(exc)
    except MemoryError:
        return RequestRefused(
            message="reading the request takes more memory than one request may use", status=400, spent=True
        )
    except RecursionError:
        return RequestRefused(message="the request is nested too deeply to be read", status=400)
    except OverflowError:  # of msgpack
        return RequestRefused(message="the request has a whole number of more than 64 bits", status=400)
    except Exception:  # noqa: BLE001 (the top of this process: the daemon logs it)
        return Failed(traceback.format_exc())


def _asking(task: Prepare, vocabulary: Vocabulary) -> Asking:
    model, settings = None, task.settings
    if settings is not None:
        given = {name: getattr(settings, name) for name in settings.__dataclass_fields__}
        model = TextModel(vocabulary=vocabulary, seen=task.seen, **given)
    return Asking(model=model, seed=task.seed, now=task.now)


def _preparation(what: str) -> Preparation[msgspec.Struct]:
    module, _, name = what.partition(":")
    assert module.startswith(MODULE), "the daemon names its own functions"
    preparation: Preparation[msgspec.Struct] = getattr(import_module(module), name)
    return preparation


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.lines) < MAX_LINES:
            self.lines.append(record.getMessage())


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    """Collect what is logged meanwhile."""
    handler, root = _Lines(), logging.getLogger("primad")
    root.setLevel(logging.INFO)
    root.addHandler(handler)
    try:
        yield handler.lines
    finally:
        root.removeHandler(handler)


def _bound_memory(more_bytes: int) -> None:
    """Limit this process to ``more_bytes`` more than it has now. If the system cannot, only the daemon checks its
    size."""
    if sys.platform != "linux":
        return
    import resource

    data_bytes = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes + more_bytes, hard))


def main() -> None:
    """Reply to tasks until standard input ends."""
    answer_tasks(msgspec.msgpack.Decoder(PrepareTask), _Process().reply)


if __name__ == "__main__":
    main()
