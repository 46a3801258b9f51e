"""The main job on one machine: a head and workers as separate processes answer a question.

Every process is a real daemon with its own home folder; they find each other by mDNS on loopback, trust each other as
processes of one user do, ship layers, form an encrypted ring and serve an OpenAI endpoint, which is then asked. Each gets
as many layers as the others (``--windows``): processes that share one machine's cores are no faster together than one alone,
so that a plan which is solved for would give one of them nearly all.
"""

from __future__ import annotations

import argparse
import json
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))
from tools.lab.daemons import daemon
from tools.lab.demo_plan import NEXT, plan_options

ROOT = Path(__file__).parent.parent
MODEL = ROOT / ".models" / "smollm2-135m-q4_1.gguf"
PROMPT = "Explain in a few sentences how a bicycle stays upright."
CONTEXT_TOKENS = 2048
READY_TIMEOUT_S = 600.0
PREFERRED_PORT = 8080

out = Console(highlight=False)


@dataclass(frozen=True)
class Answer:
    """What was measured while the answer came."""

    prompt_tokens: int
    tokens: int
    first_token_s: float
    decode_s: float


def main() -> int:
    options = _options()
    if not options.model.is_file():
        print(f"demo: error: --model {options.model}: no such file; give a GGUF model", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        with ExitStack() as stack:
            return _run(options, stack)
    except KeyboardInterrupt:
        out.print("stopped")
        return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/demo",
        description="Run one model on several local processes and ask it a question.",
        epilog="examples: tools/demo    tools/demo --devices 4 --prompt 'Why is the sky blue?'    tools/demo --keep",
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="a GGUF file (default: the embedded SmolLM2)")
    parser.add_argument("--devices", type=int, default=3, help="head and workers together (default: 3)")
    parser.add_argument("--prompt", default=PROMPT, help="the question")
    parser.add_argument("--keep", action="store_true", help="leave the endpoint up until Ctrl-C")
    options = parser.parse_args()
    if not 1 <= options.devices <= 16:
        parser.error("--devices: from 1 to 16")
    return options


def _run(options: argparse.Namespace, stack: ExitStack) -> int:
    homes = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="primad-demo-")))
    cluster = f"demo-{secrets.token_hex(4)}"  # so that devices in real use stay out of it
    port = _free_port()
    for number in range(1, options.devices):
        name = f"worker-{number}"
        with (homes / f"{name}.log").open("wb") as log:
            stack.enter_context(
                daemon(["join", "--home", str(homes / name), "--name", name, "--cluster", cluster], homes, log)
            )
    serve = ["serve", "--model", str(options.model), "--home", str(homes / "head"), "--name", "head"]
    work = ["--cluster", cluster, "--port", str(port), "--context", str(CONTEXT_TOKENS), "--sequences", "1"]
    head = stack.enter_context(daemon([*serve, *work, *plan_options(options.model, options.devices)], homes, None))
    url = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=url, timeout=httpx.Timeout(60.0, read=600.0)) as client:
        if not _wait_ready(client, head):
            for printed in sorted(homes.glob("*.log")):
                print(f"{printed.stem}: {printed.read_text(errors='replace').strip()}", file=sys.stderr)
            return 2
        out.print(f"\n[bold]{options.prompt}[/bold]")
        answer = _ask(client, options.prompt)
        out.print()
        _report(client.get("/status").json(), answer)
    if options.keep:
        _explain(url, options.model.stem)
        head.wait()
    out.print(NEXT, markup=False, soft_wrap=True)
    return 0


def _free_port() -> int:
    for wanted in (PREFERRED_PORT, 0):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", wanted))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise SystemExit("demo: error: no free port on 127.0.0.1")


def _wait_ready(client: httpx.Client, head: subprocess.Popen[bytes]) -> bool:
    """Wait until the endpoint serves; False when the head ended instead."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            head.wait(0.1)
            return False
        except subprocess.TimeoutExpired:
            pass
        try:
            if client.get("/health").status_code == httpx.codes.OK:
                return True
        except httpx.TransportError:
            continue
    return False


def _ask(client: httpx.Client, prompt: str) -> Answer:
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": 200,
        "repeat_penalty": 1.1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    first: float | None = None
    usage: dict[str, int] = {}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if not line.startswith("data: ") or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise SystemExit(f"demo: error: {chunk['error']['message']}")
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                if content := choice["delta"].get("content"):
                    first = first or time.perf_counter()
                    out.print(content, end="", markup=False, soft_wrap=True)
    end = time.perf_counter()
    out.print()
    first = first or end
    return Answer(
        prompt_tokens=usage["prompt_tokens"],
        tokens=usage["completion_tokens"],
        first_token_s=first - start,
        decode_s=end - first,
    )


def _report(status: dict[str, Any], answer: Answer) -> None:
    table = Table("device", "role", "layers", "windows", "daemon", "ring process", title=None)
    for device in status["devices"]:
        windows = ", ".join(
            f"{first}-{last - 1}" if last - first > 1 else str(first) for first, last in device["windows"]
        )
        ring = device["ring"]
        memory = "-" if ring is None else f"{ring['rss_bytes'] / 1e6:.0f} MB"
        table.add_row(
            device["name"],
            device["role"],
            str(device["layers"]),
            windows,
            f"{device['daemon_rss_bytes'] / 1e6:.0f} MB",
            memory,
        )
    out.print(table)
    rate = (answer.tokens - 1) / answer.decode_s if answer.decode_s else 0.0
    out.print(
        f"{answer.tokens} tokens, {rate:.1f} tokens/s; "
        f"time to first token {answer.first_token_s * 1000:.0f} ms ({answer.prompt_tokens} prompt tokens); "
        f"{status['rounds']} round{'s' if status['rounds'] > 1 else ''}"
    )


def _explain(url: str, model: str) -> None:
    out.print(
        f"""
The endpoint stays up at {url}/v1 until Ctrl-C. Use it with curl:

  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'

or from Python (pip install openai):

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="none")
  answer = client.chat.completions.create(
      model="{model}", messages=[{{"role": "user", "content": "Hello!"}}])
  print(answer.choices[0].message.content)
""",
        markup=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    sys.exit(main())
