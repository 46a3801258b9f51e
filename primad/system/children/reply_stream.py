"""A child process's standard output, reserved for replies whatever a library prints, and the loop that computes them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import BinaryIO, Final, TypeVar

import msgspec

from primad.system.children.channel import LENGTH, frame, frame_bytes
from primad.system.terminal import escape_uncaught

_Task = TypeVar("_Task")
STACK_BYTES: Final = 256 << 20
"""Stack of the tokenizing thread: a pre-tokenizer of llama.cpp takes up to some kB of stack for each character of a run
of equal ones."""


@contextmanager
def answer_stream() -> Iterator[BinaryIO]:
    """The stream for replies: the former standard output. Anything printed from now on goes to standard error, escaped
    so that content of a request or file cannot control the terminal."""
    escape_uncaught()
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        yield answers


def answer_lines(decoder: msgspec.json.Decoder[_Task], answer: Callable[[_Task], msgspec.Struct]) -> None:
    """Reply with ``answer`` to each task of standard input, a line of JSON, until that ends."""
    with answer_stream() as answers:
        for line in sys.stdin.buffer:
            answers.write(msgspec.json.encode(answer(decoder.decode(line))) + b"\n")
            answers.flush()


def answer_tasks(decoder: msgspec.msgpack.Decoder[_Task], answer: Callable[[_Task], msgspec.Struct]) -> None:
    """Reply with ``answer`` to each task of standard input, a frame, in a thread with a large stack. Ends the process when
    its input ends, even during a task, and when ``answer`` raises: no caller may wait for a reply that never comes."""
    tasks = SimpleQueue[bytes]()

    def work(answers: BinaryIO) -> None:
        try:
            while True:
                answers.write(frame(answer(decoder.decode(tasks.get()))))
                answers.flush()
        finally:
            os._exit(1)

    with answer_stream() as answers:
        threading.stack_size(STACK_BYTES)
        threading.Thread(target=work, args=(answers,), daemon=True).start()
        while len(length := sys.stdin.buffer.read(LENGTH.size)) == LENGTH.size:
            tasks.put(sys.stdin.buffer.read(frame_bytes(length)))
        os._exit(0)
