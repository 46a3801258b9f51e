"""What can be judged about ``primad serve`` before any device is asked, and its port."""

from __future__ import annotations

import re
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from primad.api.answering.reading import AUTO
from primad.engine.rope import AS_THE_MODEL_SAYS, Rope
from primad.errors import ConfigError
from primad.network.own_places import own_hosts
from primad.planning.run_config import DEFAULT_RUN, RunConfig
from primad.settings.config import LOOPBACK, Config, join_address

KEEP_ROWS: Final = 16
"""So many rows of an answer are lost at most with a device, besides those on their way to its replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What ``primad serve`` was asked for.

    ``wait`` is the number of workers to wait for (None: take who is there), at most ``wait_timeout_s`` (None: as long as it
    takes). ``run`` is what the plan depends on. The HTTP server listens at ``http_host`` and ``http_port``.
    Clients may also call the model by its ``aliases``, or with ``any_model`` whatever they like.
    ``chat_template`` is used in place of the model file's (None). ``tool_parser`` names the form of its calls. With
    ``context_shift`` the oldest messages of a conversation that is too long for the context are left out.
    They may reach it by the names ``allowed_hosts``, and be web pages of ``cors_origins``.
    ``embedding`` is a model file for embeddings. With ``api_key`` or ``api_key_file`` they need a key.
    ``draft`` is the file of the draft model tokens, if there is one (``auto``: one that is here). A
    request that has not begun after ``max_wait_s`` is refused (None: it waits as long as its client does).
    KV cells are kept twice every ``kv_backup`` rows of an answer (None: every ``KEEP_ROWS`` where links carry it; 0: not).
    Prompts of all API keys share their cells with ``share_prefixes``. What of an answer has to be computed again is computed
    row by row where that takes no longer than ``exact_replay_s``. ``rope`` says what angles positions have,
    ``lora`` which adapters change the model, with their scales.
    """

    wait: int | None
    wait_timeout_s: float | None
    step_timeout_s: float
    http_port: int
    single_device: bool
    run: RunConfig = DEFAULT_RUN
    draft: Path | None = None
    max_wait_s: float | None = None
    aliases: tuple[str, ...] = ()
    any_model: bool = False
    chat_template: str | None = None
    tool_parser: str = AUTO
    context_shift: bool = False
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)
    api_key_file: Path | None = None
    no_auth: bool = False
    http_host: str = LOOPBACK
    embedding: Path | None = None
    kv_backup: int | None = None
    share_prefixes: bool = False
    exact_replay_s: float = 10.0
    rope: Rope = AS_THE_MODEL_SAYS
    lora: tuple[tuple[Path, float], ...] = ()

    def keep_rows(self, *, has_cache: bool) -> int | None:
        """Of so many rows of an answer the KV cells are kept at a time; None: nothing is kept.

        A head that serves alone gives them to nobody, and keeps them for a cache alone.
        """
        if not has_cache and (self.single_device or self.kv_backup == 0):
            return None
        return self.kv_backup or KEEP_ROWS

    @property
    def url(self) -> str:
        """The endpoint as clients name it: by the address where it listens, the likeliest one where it does at all."""
        host = own_hosts(self.http_host)[0] if self.http_host in ("0.0.0.0", "::") else self.http_host
        return f"http://{join_address(host, self.http_port)}"


def is_for_several(options: ServeOptions, config: Config) -> bool:
    """Whether other devices were asked for by name or number, or all of them."""
    run = options.run
    has_windows = run.windows is not None and len(run.windows) > 1
    return has_windows or run.use_all or bool(options.wait or config.devices)


def model_id(path: Path) -> str:
    """The name that clients call the model by: its file's, without the part number of a split model."""
    return re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)


def bind_http(host: str, port: int) -> socket.socket:
    """The listening socket of the HTTP server. Raises ``ConfigError`` when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    if sys.platform != "win32":  # there it would share a taken port
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as exc:
        listener.close()
        raise ConfigError(
            f"--port {port}: cannot listen on {host}: {exc.strerror or exc}; choose another --port"
        ) from exc
    return listener
