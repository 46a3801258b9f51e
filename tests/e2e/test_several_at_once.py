"""Several answers at once: each has the text it has alone, also when a device dies under them."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.cluster import Head, all_joined, heading
from tests.e2e.streams import STORY, Told, ask

pytestmark = pytest.mark.slow

PROMPTS = (STORY, "The capital of France is", f"{STORY} there lived a baker. " * 20, "One, two,")
TOKENS = 60


def ask_all(head: Head, act: Callable[[], object] | None = None) -> list[Told]:
    """All prompts at once; ``act`` in the middle of the first answer."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        asked = [
            pool.submit(ask, head, act if number == 0 else None, tokens=TOKENS, middle=20, prompt=prompt)
            for number, prompt in enumerate(PROMPTS)
        ]
        return [answer.result() for answer in asked]


def test_answers_at_once_are_what_each_is_alone_though_a_worker_is_killed(smollm2: Path, module_home):
    cluster = f"several-{secrets.token_hex(6)}"
    with ExitStack() as stack:
        first, second = stack.enter_context(all_joined([module_home("w1"), module_home("w2")], cluster))
        arguments = ("--wait", 2, "--use-all", "--context", 1024, "--sequences", 3)
        head: Head = stack.enter_context(heading(smollm2, module_home("head"), cluster, *arguments, config=""))
        head.wait_serving()
        alone = [ask(head, tokens=TOKENS, prompt=prompt).text for prompt in PROMPTS]
        assert all(alone)
        undisturbed = ask_all(head)
        assert [told.text for told in undisturbed] == alone
        disturbed = ask_all(head, second.kill)
        assert [(told.text, told.error) for told in disturbed] == [(text, None) for text in alone], head.run.output
        assert first.process.poll() is None
        assert "Traceback" not in head.run.output
