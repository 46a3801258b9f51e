"""``pictures``: what a model that sees costs compared with one that reads, through ``primad serve`` over HTTP, on one
device with all cores.

The encoder is the lab's, with half the layers of a CLIP ViT-L/14-336 and random weights; each picture is new.

``encode``: seconds from a request that counts a picture's tokens to its response, compared with libmtmd with the
encoder in this process. ``kept``: seconds to the first token of a second question about a picture, compared with the
first question. ``beside``: the time between tokens of a completion (95th percentile) while picture after picture is
encoded, compared with a completion by itself.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import statistics
import threading
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from primad.engine.pictures.encoder import PictureEncoder
from primad.gguf.model import open_model
from tools.lab.figures import Compared
from tools.lab.harness import CORES, SMALL, Bench, Run, flag, in_thread
from tools.lab.http_servers import HttpServer
from tools.lab.mmproj import Eye, noise, write_encoder
from tools.lab.plain_llama import PROMPT

EYE: Final = Eye(width=1024, heads=16, layers=12, feed_forward=4096, side=336, patch=14, merge=1)
FAMILY: Final = "mlp"
OPTIONS: Final = ("--context", "2048", "--extra-buffers", "off")
ASKED: Final[dict[str, Any]] = {"ignore_eos": True, "cache_prompt": False, "speculate": False}
PROMPT_TOKENS: Final = 40
TOKENS: Final = 160
WHAT: Final = {
    "encode": "seconds of a picture, of libmtmd's",
    "kept": "seconds to the first token with a kept picture, of a new one's",
}
CASES: Final = (*WHAT, "beside")
LATE: Final = 0.95
MAX_TIMES_BESIDE: Final = 2.0
ANSWER_S: Final = 300.0


def _picture(seed: int) -> str:
    return base64.b64encode(noise(seed, EYE.side, EYE.side)).decode()


def _encode_s(head: HttpServer, model: str, picture: str) -> float:
    """Return the seconds until the head reports how many tokens ``picture`` has."""
    source = {"type": "base64", "media_type": "image/png", "data": picture}
    body = {"model": model, "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
    asked = urllib.request.Request(f"{head.url}/v1/messages/count_tokens", json.dumps(body).encode(), method="POST")
    asked.add_header("Content-Type", "application/json")
    begin_s = time.perf_counter()
    with urllib.request.urlopen(asked, timeout=ANSWER_S) as answered:
        answered.read()
    return time.perf_counter() - begin_s


def _first_s(head: HttpServer, picture: str, question: str) -> float:
    """Return the seconds to the first token of a completion for ``question`` about ``picture``."""
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
        {"type": "text", "text": question},
    ]
    asked = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2, "stream": True, "speculate": False}
    begin_s = time.perf_counter()
    with closing(head.events("/v1/chat/completions", asked)) as events:
        for at_s, body in events:
            if any(each["delta"].get("content") for each in json.loads(body)["choices"]):
                return at_s - begin_s
    return time.perf_counter() - begin_s


class Turns:
    """Measurements of ``head``, whose encoder file is ``encoder``; each picture is sent by one measurement only."""

    def __init__(self, head: HttpServer, model: Path, encoder: Path) -> None:
        self._head, self._name = head, model.stem
        self._plain = PictureEncoder(str(encoder), str(model), threads=CORES)
        self._seeds = itertools.count(1)

    def encoded(self, _: int) -> tuple[float, float]:
        """Return the seconds that the head takes for a picture, and those of libmtmd in this process."""
        picture = _picture(next(self._seeds))
        served_s, begin_s = _encode_s(self._head, self._name, picture), time.perf_counter()
        self._plain.encode(base64.b64decode(picture))
        return served_s, time.perf_counter() - begin_s

    def kept(self, _: int) -> tuple[float, float]:
        """Return the seconds to the first token for a second question about a picture, and for the first question."""
        picture = _picture(next(self._seeds))
        new_s = _first_s(self._head, picture, "What is it?")
        return _first_s(self._head, picture, "Which colours has it?"), new_s

    def alone(self, _: int) -> list[float]:
        """Return the seconds between the tokens of a completion."""
        times = self._head.stream(PROMPT[:PROMPT_TOKENS], TOKENS, **ASKED)
        return [b - a for a, b in itertools.pairwise(times)]

    def beside(self, number: int) -> list[float]:
        """Return the same while pictures are encoded."""
        over = threading.Event()

        def encode() -> None:
            while not over.is_set():
                _encode_s(self._head, self._name, _picture(next(self._seeds)))

        with ThreadPoolExecutor(1) as pool:
            encoding = pool.submit(encode)
            try:
                return self.alone(number)
            finally:
                over.set()
                encoding.result()


def _late_s(waits: Sequence[float]) -> float:
    return sorted(waits)[int(LATE * len(waits))]


async def measure(run: Run, model: Path) -> None:
    """Measure everything in turn."""
    header = open_model(model)
    width = header.count(f"{header.text('general.architecture')}.embedding_length")
    encoder = run.folder() / "mmproj-bench.gguf"
    await asyncio.to_thread(write_encoder, encoder, FAMILY, width, EYE)
    head = await asyncio.to_thread(run.head, model, 1, *OPTIONS, "--mmproj", str(encoder))
    turns = Turns(head, model, encoder)

    def add(case: str, what: str, ours: Sequence[float], theirs: Sequence[float], at_most: float | None = None) -> None:
        run.add(Compared(model=model.stem, case=case, devices=1, what=what, found=ours, beside=theirs, at_most=at_most))

    pairs = {"encode": turns.encoded, "kept": turns.kept}
    found = await run.alternate({case: in_thread(pair) for case, pair in pairs.items() if case in run.options.case})
    for case, its in found.items():
        ours, theirs = zip(*its, strict=True)
        add(case, WHAT[case], ours, theirs)
    if "beside" not in run.options.case:
        return
    waits = await run.alternate({"alone": in_thread(turns.alone), "beside": in_thread(turns.beside)})
    beside, alone = waits["beside"], waits["alone"]
    what = "seconds between tokens, 95 of 100 shorter, of those by itself"
    add("beside", what, [*map(_late_s, beside)], [*map(_late_s, alone)], MAX_TIMES_BESIDE)
    rates = [[1 / statistics.mean(each) for each in its] for its in (beside, alone)]
    add("beside", "tokens/s, of those by itself", rates[0], rates[1])


BENCH: Final = Bench(
    help="a model that sees: time of a picture, of the first token with a kept one, and of tokens during an encoding",
    measure=measure,
    models=(SMALL,),
    rounds=3,
    flags=(flag("--case", choices=CASES, nargs="+", default=CASES),),
    quick={"rounds": 1},
    quick_models=(SMALL,),
)
