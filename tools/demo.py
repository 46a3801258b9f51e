"""The main use case on one machine: a head and workers as separate processes answer a question.

Every process is a real daemon with its own home folder. They find each other by mDNS on loopback, trust each other as
processes of one user do, ship layers, form an encrypted ring and serve an OpenAI endpoint, which is then queried. Each
gets the same number of layers (``--windows``): processes that share one machine's cores are no faster together than one
alone, so a solved plan would give one of them nearly all layers.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))
from tools.lab.demo_plan import NEXT, plan_options
from tools.lab.http_servers import HttpServer, head_here
from tools.lab.names import LabError

ROOT = Path(__file__).parent.parent
MODEL = ROOT / ".models" / "smollm2-135m-q4_1.gguf"
PROMPT = "Explain in a few sentences how a bicycle stays upright."
PREFERRED_PORT = 8080
HEAD = ("--context", "2048", "--sequences", "1")
KEPT = """
The endpoint stays up at {url}/v1 until Ctrl-C. Use it with curl:

  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'

or from Python (pip install openai):

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="none")
  completion = client.chat.completions.create(
      model="{model}", messages=[{{"role": "user", "content": "Hello!"}}])
  print(completion.choices[0].message.content)
"""

out = Console(highlight=False)


def main() -> int:
    options = _options()
    if not options.model.is_file():
        print(f"demo: error: --model {options.model}: no such file; give a GGUF model", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with tempfile.TemporaryDirectory(prefix="primad-demo-") as folder:
        homes = Path(folder) / "homes"
        try:
            _run(options, homes)
        except LabError as exc:
            for log in sorted(homes.glob("*.log")):
                print(f"{log.stem}: {log.read_text(errors='replace').strip()}", file=sys.stderr)
            print(f"demo: error: {exc}", file=sys.stderr)
            return 2
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


def _run(options: argparse.Namespace, homes: Path) -> None:
    workers = [f"worker-{number}" for number in range(1, options.devices)]
    head = (*HEAD, *plan_options(options.model, options.devices))
    with head_here(options.model, homes, workers, head=head, port=PREFERRED_PORT, is_heard=True) as server:
        out.print(f"\n[bold]{options.prompt}[/bold]")
        spoken = _ask(server, options.prompt)
        status = server.status()
        _show(status["devices"])
        out.print(f"{spoken}; {status['rounds']} round{'s' if status['rounds'] > 1 else ''}")
        if options.keep:
            out.print(KEPT.format(url=server.url, model=options.model.stem), markup=False, soft_wrap=True)
            server.process.wait()
    out.print(NEXT, markup=False, soft_wrap=True)


def _ask(server: HttpServer, prompt: str) -> str:
    """Print the response as it arrives; return its speed, in words."""
    asked = {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": 200,
        "repeat_penalty": 1.1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    usage, came, begin_s = dict[str, int](), list[float](), time.perf_counter()
    for at_s, event in server.events("/v1/chat/completions", asked):
        chunk = json.loads(event)
        if "error" in chunk:
            raise LabError(chunk["error"]["message"])
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            if content := choice["delta"].get("content"):
                came.append(at_s)
                out.print(content, end="", markup=False, soft_wrap=True)
    out.print("\n")
    tokens, took_s = usage["completion_tokens"], came[-1] - came[0] if came else 0.0
    return (
        f"{tokens} tokens, {(tokens - 1) / took_s if took_s else 0.0:.1f} tokens/s; time to first token "
        f"{1e3 * (came[0] - begin_s) if came else 0.0:.0f} ms ({usage['prompt_tokens']} prompt tokens)"
    )


def _show(devices: list[dict[str, Any]]) -> None:
    """Show the layers and memory of each device."""
    table = Table("device", "role", "layers", "windows", "daemon", "ring process", title=None)
    for device in devices:
        windows = (f"{first}-{last - 1}" if last - first > 1 else str(first) for first, last in device["windows"])
        ring = device["ring"]
        table.add_row(
            device["name"],
            device["role"],
            str(device["layers"]),
            ", ".join(windows),
            f"{device['daemon_rss_bytes'] / 1e6:.0f} MB",
            "-" if ring is None else f"{ring['rss_bytes'] / 1e6:.0f} MB",
        )
    out.print(table)


if __name__ == "__main__":
    sys.exit(main())
