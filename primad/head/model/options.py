"""The options of ``primad serve`` that are checked before any device is contacted, and its port."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from primad.api.answering.reading import AUTO
from primad.engine.rope import AS_IN_THE_MODEL, Rope
from primad.head.model.encoder import AUTO as BESIDE
from primad.network.own_places import url_for_clients
from primad.planning.run_config import DEFAULT_RUN, RunConfig
from primad.settings.config import LOOPBACK, Config

BLOCK_TOKENS: Final = 16
"""The default maximum of tokens lost with a device, besides those in transit to its replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of ``primad serve``.

    ``wait`` is the number of workers to wait for (None: use those that are present), for at most ``wait_timeout_s``
    (None: unlimited). ``run`` is what the plan depends on. The HTTP server listens at ``http_host`` and ``http_port``.
    The model is also served under its ``aliases``, or with ``any_model`` under every name. ``chat_template`` replaces
    the model file's template (None: it is kept). ``tool_parser`` names the model's tool-call format. With
    ``context_shift`` the oldest messages of a conversation that is too long for the context are dropped. Clients may
    use the host names ``allowed_hosts``, and web pages of ``cors_origins`` may be clients. ``embedding`` is a model
    file for embeddings. With ``api_key`` or ``api_key_file`` clients need a key. ``draft`` is the file of the draft
    model, if there is one (``auto``: one on this device). A request that has not begun after ``max_wait_s`` is refused
    (None: no limit). KV cache is replicated every ``kv_backup`` tokens (None: every ``BLOCK_TOKENS`` if links are fast
    enough; 0: never). With ``share_prefixes`` prompts of all API keys share the cache. Lost tokens are recomputed one
    by one if that takes at most ``exact_replay_s``. ``rope`` overrides RoPE; ``lora`` are adapters of the model, with
    their scales. ``name`` and ``embedding_name`` are the models' names for clients, if not their files' names.
    ``sampling`` overrides the file's sampling defaults. If ``is_only``, the head serves only this model; otherwise the
    model is one of several, loaded when a request names it. ``mmproj`` is the encoder of pictures (``auto``:
    ``projector``, which the library knows, or one next to the model). ``image_tokens`` are the minimum and maximum of
    tokens per picture (0: the encoder's own limits). With ``fetch_images`` the head fetches pictures that are URLs.
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
    embedding_name: str | None = None
    kv_backup: int | None = None
    share_prefixes: bool = False
    exact_replay_s: float = 10.0
    rope: Rope = AS_IN_THE_MODEL
    lora: tuple[tuple[Path, float], ...] = ()
    name: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    is_only: bool = True
    mmproj: Path = BESIDE
    projector: Path | None = None
    image_tokens: tuple[int, int] = (0, 0)
    fetch_images: bool = False

    @property
    def embedding_id(self) -> str | None:
        """The name of the embedding model in the API; None without one."""
        return None if self.embedding is None else self.embedding_name or model_id(self.embedding)

    def block_tokens(self, *, has_cache: bool) -> int | None:
        """Return the number of tokens per saved KV block; None: nothing is saved.

        A head that serves alone has no replicas, and saves blocks only for a cache.
        """
        if not has_cache and (self.single_device or self.kv_backup == 0):
            return None
        return self.kv_backup or BLOCK_TOKENS

    @property
    def url(self) -> str:
        """The endpoint's URL for clients: with the listening address, or the likeliest address for a wildcard."""
        return url_for_clients(self.http_host, self.http_port)


def is_for_several(options: ServeOptions, config: Config) -> bool:
    """Return whether other devices were requested: by name, by number, or all of them."""
    run = options.run
    has_windows = run.windows is not None and run.devices_by_hand > 1
    return has_windows or run.use_all or bool(options.wait or config.devices)


def model_id(path: Path) -> str:
    """Return the model's name for clients: its file's name, without the part number of a split model."""
    return re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
