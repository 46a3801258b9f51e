"""What can be judged about ``primad serve`` before any device is asked: context, workload, windows by hand, the port."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from halda import (
    DeviceProfile,
    ExpertPlace,
    Infeasible,
    ModelProfile,
    Objective,
    Plan,
    Solution,
    Workload,
    arrange,
    evaluate,
    instance,
    residency,
)
from halda.instance import Instance
from primad.api.reading import AUTO
from primad.engine.protocol import KvType
from primad.engine.rope import AS_THE_MODEL_SAYS, Rope
from primad.errors import ConfigError, PlanError
from primad.network.own_places import own_hosts
from primad.planning.batching import BatchingMode
from primad.planning.default_context import SolvedPlan, WithContext, first_context, with_wanted_context
from primad.planning.drafting import SpeculateMode
from primad.planning.question import check_kv_type, default_workload
from primad.settings.config import LOOPBACK, Config, join_address
from primad.settings.quantities import show_bytes

KEEP_ROWS: Final = 16
"""So many rows of an answer are lost at most with a device, besides those on their way to its keeper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What ``primad serve`` was asked for.

    ``wait`` is the number of workers to wait for (None: take who is there), at most ``wait_timeout_s`` (None: as long as it
    takes). ``windows`` and ``rounds`` set the plan by hand; otherwise it makes ``objective`` small, with every device in it
    if ``use_all``; ``experts`` says where those of layers on a GPU are. The HTTP server listens at ``http_host`` and
    ``http_port``.
    Clients may also call the model by its ``aliases``, or with ``any_model`` whatever they like.
    ``chat_template`` is used in place of the model file's (None). ``tool_parser`` names the form of its calls. With
    ``context_shift`` the oldest messages of a conversation that is too long for the context are left out.
    They may reach it by the names ``allowed_hosts``, and be web pages of ``cors_origins``.
    ``embedding`` is a model file for embeddings. With ``api_key`` or ``api_key_file`` they need a key.
    ``extra_buffers`` is auto, on or off. Prompts are computed ``rows`` rows at a time, unless a plan that streams is better
    with more, for typical prompts of ``prompt_tokens``, or memory is so short that fewer are. So many ``sequences`` have a
    KV cache each (None: as many as the plan has room for): as many generations run at once, and as many prompts are
    remembered. ``batching`` says whether what they compute together must be exact. Tokens that may come next are guessed as
    ``speculate`` says, by the model file ``draft`` if there is one (``auto``: one that is here), on the device ``draft_on``
    (None: where it wins most), and computed ahead. A
    request that has not begun after ``max_wait_s`` is refused (None: it waits as long as its client does).
    KV cells are kept twice every ``kv_backup`` rows of an answer (None: every ``KEEP_ROWS`` where links carry it; 0: not).
    Prompts of all API keys share their cells with ``share_prefixes``. What of an answer has to be computed again is computed
    row by row where that takes no longer than ``exact_replay_s``. ``rope`` says what angles positions have,
    ``lora`` which adapters change the model, with their scales.
    """

    wait: int | None
    wait_timeout_s: float | None
    windows: tuple[int, ...] | None
    rounds: int | None
    extra_buffers: str
    context_tokens: int | None
    prompt_tokens: int | None
    rows: int
    kv_type: KvType
    step_timeout_s: float
    http_port: int
    alone: bool
    objective: Objective
    use_all: bool
    experts: ExpertPlace = "auto"
    sequences: int | None = None
    batching: BatchingMode = "auto"
    speculate: SpeculateMode = "auto"
    draft: Path | None = None
    draft_on: str | None = None
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
        if not has_cache and (self.alone or self.kv_backup == 0):
            return None
        return self.kv_backup or KEEP_ROWS

    @property
    def url(self) -> str:
        """The endpoint as clients name it: by the address where it listens, the likeliest one where it does at all."""
        host = own_hosts(self.http_host)[0] if self.http_host in ("0.0.0.0", "::") else self.http_host
        return f"http://{join_address(host, self.http_port)}"


def is_for_several(options: ServeOptions, config: Config) -> bool:
    """Whether other devices were asked for by name or number, or all of them."""
    has_windows = options.windows is not None and len(options.windows) > 1
    return has_windows or options.use_all or bool(options.wait or config.devices)


def plan_by_hand(names: Sequence[str], windows: tuple[int, ...], rounds: int | None, model: ModelProfile) -> Plan:
    """The plan in which the devices ``names`` have these layers a round. Raises ``PlanError`` naming the flag."""
    try:
        return arrange(names, windows, rounds=rounds or 1, model=model)
    except Infeasible as exc:
        raise PlanError(f"--windows {','.join(map(str, windows))}: {exc}; choose other windows") from exc


def stream_by_hand(plan: Plan, devices: Sequence[DeviceProfile], model: ModelProfile, workload: Workload) -> Plan:
    """``plan``, set by hand, with as little streaming as the memory of ``devices`` needs.

    Raises ``PlanError`` where a device does not have memory enough even so.
    """
    question = instance(devices, [], model, workload, {}, plan.head)
    plan = residency(plan, question)
    for short in evaluate(plan, question).short:
        if short.what == "RAM" and short.where in plan.devices:
            raise PlanError(
                f"--windows: {short.where} is short of {show_bytes(short.short_bytes)} of RAM for its "
                f"{plan.layers_of(short.where)} layers, streaming included; give it fewer layers, or choose a smaller "
                f"--context than {workload.context_tokens} or another --kv-type than {workload.kv_type}"
            )
    return plan


def with_context_by_hand(
    plan: Plan,
    devices: Sequence[DeviceProfile],
    model: ModelProfile,
    workload: Workload,
    wanted_tokens: int,
    objective: Objective,
) -> WithContext:
    """``plan``, set by hand, with ``wanted_tokens`` of context if they cost little. Raises ``PlanError``."""

    def asked(work: Workload) -> Instance:
        return instance(devices, [], model, work, {}, plan.head)

    def placed(work: Workload, hurries: bool) -> SolvedPlan:
        question = asked(work)
        found = residency(plan, question)
        prediction = evaluate(found, question)
        if work != workload and prediction.short:
            raise Infeasible("the windows do not fit", short_bytes=0)
        value_s = prediction.objective_s(objective, work.answer_tokens)
        return Solution(
            plan=found, prediction=prediction, objective=objective, objective_s=value_s, bound_s=0.0, proven=False
        ), [*devices]

    stream_by_hand(plan, devices, model, workload)
    return with_wanted_context(workload, wanted_tokens, placed, asked)


def workload_of(options: ServeOptions, model: ModelProfile) -> Workload:
    """What plans are made for, one sequence where nobody said how many.

    Raises ``ConfigError`` naming the flag that does not suit ``model``.
    """
    check_kv_type(options.kv_type, model)
    return default_workload(
        first_context(options.context_tokens, model),
        options.rows,
        options.kv_type,
        sequences=options.sequences or 1,
        prompt_tokens=options.prompt_tokens,
    )


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
