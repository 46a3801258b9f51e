"""The draft process: ``python -m primad.ring.speculation.process FD`` works ahead of the completion that it is given.

It checks for messages between two steps of its own, and ends with the head's ring process, which never waits for it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from halda.assignment import WindowAssignment
from primad.engine.llama.windows import WholeModel
from primad.engine.protocol import EngineOptions, WindowSource
from primad.engine.vocabulary import LlamaVocabulary
from primad.errors import EngineError
from primad.ring.speculation.branches import PART_ROWS, POOL, DraftBranches
from primad.ring.speculation.messages import DraftModel, DraftTask, DraftText, DraftTokens
from primad.system.children.channel import RingChannel
from primad.system.children.child import inherited
from primad.system.terminal import escape_uncaught

NICE: Final = 5
"""The ring's own steps take precedence over drafts."""


def _load(model: DraftModel) -> DraftBranches:
    size = model.vocabulary or _vocabulary_size(Path(model.path))
    assignment = WindowAssignment(
        first=0,
        last=model.layers,
        gpu_layers=0,
        output="cpu",
        layer_bytes=model.bytes,
        output_bytes=0,
        resident_bytes=model.bytes,
    )
    source = WindowSource(window=0, metadata=model.path, layers=model.files, assignment=assignment, extra_buffers=False)
    options = EngineOptions(
        context=model.context,
        sequences=1,
        rows=PART_ROWS,
        threads=model.threads,
        batch_threads=model.threads,
        kv_type="f16",
        lock=False,
        branches=POOL,
    )
    window = WholeModel(source, options, frozenset(), vocabulary=size)
    return DraftBranches(window, context=model.context, maximum=model.maximum, branches=POOL, first=model.first)


def _vocabulary_size(path: Path) -> int:
    vocabulary = LlamaVocabulary(path)
    try:
        return vocabulary.size
    finally:
        vocabulary.release()


def main() -> None:
    """Draft until the other end closes or the model fails."""
    escape_uncaught()
    try:
        _draft()
    except EngineError as exc:
        sys.exit(f"the draft process: {exc}")


def _draft() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "nice"):
        with contextlib.suppress(OSError):
            os.nice(NICE)
    channel: RingChannel[DraftTask] = RingChannel(inherited(sys.argv[1]), msgspec.msgpack.Decoder(DraftTask))
    chain: DraftBranches | None = None
    while channel.is_open:
        has_work = chain is not None and chain.has_work
        ready, _, _ = select.select([channel.connection], [], [], 0 if has_work else None)
        for task in channel.commands() if ready else ():
            match task:
                case DraftModel():
                    chain = _load(task)
                case DraftText(number=number, tokens=tokens) if chain is not None:
                    chain.begin(number, tokens)
                case DraftTokens(tokens, known) if chain is not None and known == chain.known:
                    for token in tokens:
                        chain.took(token)
        if channel.is_open and chain is not None and chain.has_work:
            began_s = time.perf_counter()
            drafted = chain.work()
            if drafted is not None:
                channel.notify(replace(drafted, draft_s=time.perf_counter() - began_s))


if __name__ == "__main__":
    main()
