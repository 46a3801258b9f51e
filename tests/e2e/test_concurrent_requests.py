"""Several concurrent requests: each has the same text as alone, even if a device dies."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path

import pytest

from tests.e2e.cluster import Head, all_joined, heading
from tests.e2e.streams import STORY, Reported, ask, show

pytestmark = pytest.mark.slow

PROMPTS = (STORY, "The capital of France is", f"{STORY} there lived a baker. " * 12, "One, two,")
TOKENS = 240


def ask_all(head: Head, streams: int, act: Callable[[], object] | None = None, **fields: object) -> list[Reported]:
    """Run ``streams`` requests concurrently, cycling through the prompts; call ``act`` during the first one."""
    with ThreadPoolExecutor(streams) as pool:
        asked = [
            pool.submit(ask, head, each, still=True, tokens=TOKENS, middle=10, prompt=prompt, **fields)
            for each, prompt in zip([act] + [None] * (streams - 1), cycle(PROMPTS), strict=False)
        ]
        return [answer.result() for answer in asked]


@pytest.mark.parametrize(("streams", "sequences"), [(4, 3), pytest.param(8, 8, marks=pytest.mark.matrix)])
def test_concurrent_requests_have_the_texts_of_single_ones_even_if_a_worker_is_killed(
    quick_model: Path, module_home, streams, sequences
):
    cluster = f"several-{secrets.token_hex(6)}"
    with ExitStack() as stack:
        homes = [module_home(f"w{number}-{streams}") for number in (1, 2)]
        first, second = stack.enter_context(all_joined(homes, cluster))
        arguments = ("--wait", 2, "--use-all", "--context", 1024, "--sequences", sequences, "--batching", "exact")
        home = module_home(f"head-{streams}")
        head: Head = stack.enter_context(heading(quick_model, home, cluster, *arguments, config=""))
        head.wait_serving()
        alone = [ask(head, tokens=TOKENS, prompt=prompt).text for prompt in PROMPTS]
        assert all(alone)
        expected = [text for _, text in zip(range(streams), cycle(alone), strict=False)]
        undisturbed = ask_all(head, streams)
        assert [reported.text for reported in undisturbed] == expected
        disturbed = ask_all(head, streams, second.kill)
        show(
            f"a worker killed under {streams} answers: longest gap {max(reported.gap_s for reported in disturbed):.2f} s"
        )
        assert [(reported.text, reported.error) for reported in disturbed] == [(text, None) for text in expected], (
            head.run.output
        )
        assert first.process.poll() is None
        assert "Traceback" not in head.run.output
