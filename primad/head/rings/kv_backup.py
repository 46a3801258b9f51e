"""Manages the KV cache of all requests on the head: replicates it while it grows, and has it present when a ring needs
it.

The ring reports which blocks its devices keep (``ring/keeping.py``). Once a second another device, the replica, is
notified which new blocks of a worker to hold as well. Before a ring resumes the requests of another ring, each of its
devices is asked to hold their blocks in the layers of its windows; blocks that all devices hold are not recomputed.
With a cache, prompts of new requests are looked up in the same way. Unneeded blocks are dropped everywhere.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec

from halda import Plan
from primad.api.http.status import CopyStatus, KvStatus
from primad.daemon.kv_blocks import HeldBlocks
from primad.errors import ClusterError
from primad.gguf.architectures.tensors import turns_by_context
from primad.gguf.windows import control_tokens
from primad.head.members.core import HeadContext
from primad.head.members.devices import Devices
from primad.head.model.service import Service
from primad.head.rings.ring import HeadRing
from primad.kv.cells import layers_of_rank
from primad.kv.keys import KvBlock, state_behind, to_go_on_from, up_to_lacking
from primad.network.contacts import Contact
from primad.network.messages import MAX_BLOCKS, KvForget, KvHold
from primad.planning.batching import min_rows
from primad.planning.forecast import Forecast
from primad.planning.replicas import Kept, cell_bytes, holders, replicas, state_bytes, token_bytes
from primad.ring.chunks import Chunking, ChunkSize
from primad.ring.keeping import prompt_blocks, without_old_states
from primad.system.tasks import Tasks

logger = logging.getLogger(__name__)

COPY_S: Final = 10.0
"""A replica that receives nothing for this long is notified again."""
MAX_COPIED: Final = 1024
"""Blocks per message to a replica."""
MAX_TRIES: Final = 20
"""A block that its device has failed to deliver this many times counts as lost there."""
MIN_RESTORE_S: Final = 2.0
WAITED_A_TOKEN_S: Final = 0.005
"""Half of the time to recompute a token if that is fast."""
MAX_RESTORE_S: Final = 30.0
"""The longest that a request waits before missing blocks are recomputed."""
_LAST_WRITES_S: Final = (0.02, 0.1, 0.3)
MIN_FIND_S: Final = 0.1
"""The least time that a prompt waits for cached blocks of other devices; it waits longer if computing it takes
longer."""
MAX_ROOTS: Final = 1024
"""The number of owners whose root is remembered."""

Layers = list[tuple[int, int]]
_Shares = tuple[int, int, list[int]]
"""First and last layer of a group's window, and the weights of its ranks."""


@dataclass(slots=True)
class _Copy:
    """The blocks of one device and their replica, which fetches them from ``source``. ``pending`` maps each block to
    its number of attempts."""

    kept: Kept
    layers: Layers
    source: list[Contact]
    pending: dict[str, int] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    is_busy: bool = False


class KvBackup:
    """Manages all blocks of this head. Run ``run`` next to the rings."""

    def __init__(self, head: HeadContext, service: Service, devices: Devices, held: HeldBlocks) -> None:
        self._node, self._service, self._reporter = head.node, service, head.reporter
        self._devices, self._held = devices, held
        self._head = head.node.config.name
        self._blocks: dict[str, KvBlock] = {}
        """Needed blocks."""
        self._begun: set[str] = set()
        """Blocks that devices of the ring may keep, not reported as kept or forgotten yet."""
        self._lasting: set[str] = set()
        """Blocks of prompts, which may be useful later."""
        self._forgotten: dict[str, bool] = {}
        """Dropped blocks that devices have not been notified of, and whether they are lasting."""
        self._copies: list[_Copy] = []
        self._reported: set[str] = set()
        self._epoch = 0
        self._keeps = False
        self._layers: dict[str, Layers] = {}
        self._sources: dict[str, list[Contact]] = {}
        self._chunking: Chunking | None = None
        self._prompt_token_s = 0.0
        """The predicted time per prompt token."""
        self._shares: list[_Shares] = []
        """The shares of the serving groups; only rings with the same shares can use their KV cache."""
        self._roots: dict[str, str] = {}
        self._computed: tuple[object, ...] = True, 0
        """The attention that blocks are computed with, and the context size if RoPE angles depend on it."""
        self._news, self._over, self._state_news = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._tasks = Tasks()
        self._restores = self._restored_tokens = self._again = self._found_tokens = 0
        self._restore_s = 0.0

    async def run(self) -> None:
        """Notify replicas what to hold, and all devices what to drop."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._notify_replicas())
                group.create_task(self._notify_forgotten())
        finally:
            await self._tasks.close()

    async def _notify_replicas(self) -> None:
        """Run once a second, and immediately after a state: tokens after the last state are recomputed after a loss."""
        while True:
            await self._news.wait()
            self._news.clear()
            for copy in self._copies:
                if copy.pending and not copy.is_busy:
                    copy.is_busy = True
                    self._tasks.start(self._copy(copy))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._state_news.wait(), self._node.timings.head.copy_every_s)
            self._state_news.clear()

    async def _notify_forgotten(self) -> None:
        """Run immediately: a repeated request gets blocks with the same keys, which must not be dropped after they are
        kept."""
        while True:
            await self._over.wait()
            await self._report_forgotten()

    async def _report_forgotten(self) -> None:
        self._over.clear()
        forgotten, self._forgotten = self._forgotten, {}
        for lasting in (False, True):
            keys = [key for key, lasts in forgotten.items() if lasts == lasting]
            for at in range(0, len(keys), MAX_BLOCKS):
                await self._notify_all(KvForget(keys=keys[at : at + MAX_BLOCKS], lasting=lasting))

    async def _notify_all(self, forget: KvForget) -> None:
        """Notify the workers first: removing files takes a while, and meanwhile they may keep the same keys again."""
        for worker in list(self._devices.workers.values()):
            try:
                await worker.send(forget)
            except ClusterError:
                logger.info("cannot tell %s which KV cache to drop", worker.name)  # it drops all with this head
        await self._held.forget(forget.keys, lasting=forget.lasting)

    async def close(self) -> None:
        """Tell all devices to drop its blocks; where there is a cache, blocks of prompts may stay."""
        self._copies = []
        self._drop([*self._blocks, *self._begun])
        await self._report_forgotten()

    # ---- reports of rings --------------------------------------------------------------------------------------------

    def begun(self, epoch: int, keys: Iterable[str]) -> None:
        """Devices of ring ``epoch`` may keep ``keys`` from now on."""
        if epoch == self._epoch:
            for key in keys:
                self._begun.add(key)
                self._forgotten.pop(key, None)

    def kept(self, epoch: int, blocks: Iterable[KvBlock], prompt_tokens: int) -> None:
        """Every device of ring ``epoch`` keeps ``blocks`` of a request whose prompt has ``prompt_tokens`` tokens."""
        if epoch == self._epoch:
            blocks = list(blocks)
            self._need(blocks, prompt_tokens)
            self._report_news(block.is_state for block in blocks)

    def _report_news(self, are_states: Iterable[bool]) -> None:
        self._news.set()
        if any(are_states):
            self._state_news.set()

    def forgotten(self, epoch: int, keys: Iterable[str]) -> None:
        """Ring ``epoch`` no longer needs ``keys``."""
        if epoch == self._epoch:
            self._drop(keys)

    def _need(self, blocks: Iterable[KvBlock], prompt_tokens: int) -> None:
        for block in blocks:
            self._blocks[block.key] = block
            self._begun.discard(block.key)
            self._forgotten.pop(block.key, None)
            if block.end <= prompt_tokens:
                self._lasting.add(block.key)
            for copy in self._copies:
                if copy.kept.replica is not None and block.key not in copy.held:
                    copy.pending.setdefault(block.key, 0)

    def _drop(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._blocks.pop(key, None)
            self._begun.discard(key)
            self._forgotten[key] = key in self._lasting
            self._lasting.discard(key)
            for copy in self._copies:
                copy.pending.pop(key, None)
                copy.held.discard(key)
        self._over.set()

    # ---- copies --------------------------------------------------------------------------------------------------------

    async def _copy(self, copy: _Copy) -> None:
        """Have the replica hold the pending blocks."""
        try:
            assert copy.kept.replica is not None
            blocks = [self._blocks[key] for key in list(copy.pending)[:MAX_COPIED]]
            held = await self._hold(copy.kept.replica, blocks, copy.layers, copy.source, COPY_S, verify=False)
            for block, is_held in zip(blocks, held, strict=True):
                tries = copy.pending.pop(block.key, None)
                if tries is not None and is_held:
                    copy.held.add(block.key)
                elif tries is not None and tries < MAX_TRIES:
                    copy.pending[block.key] = tries + 1
        finally:
            copy.is_busy = False
            if copy.pending:
                self._report_news(key in self._blocks and self._blocks[key].is_state for key in copy.pending)

    async def _hold(
        self,
        device: str,
        blocks: Sequence[KvBlock],
        layers: Layers,
        sources: list[Contact],
        timeout_s: float,
        *,
        verify: bool,
    ) -> list[bool]:
        """Return, for each of ``blocks``, whether ``device`` has it now; all False if it does not reply."""
        hold = KvHold(number=0, blocks=list(blocks), layers=layers, sources=sources, timeout_s=timeout_s, verify=verify)
        if device == self._head:
            return await self._held.hold(hold)
        try:
            return await self._devices.workers[device].hold_blocks(hold)
        except (KeyError, ClusterError) as exc:
            logger.info("%s holds no requested KV cache: %s", device, exc)
            return [False] * len(blocks)

    # ---- rings that begin ----------------------------------------------------------------------------------------------

    async def prepare(self, ring: HeadRing, chains: Mapping[int, Sequence[KvBlock]]) -> None:
        """While ``ring`` is being formed, have its devices hold the blocks of ``chains``; existing blocks are
        verified."""
        if self._shares == _shares(ring.plan):
            await self._bring(ring, _blocks_of(chains), verify=True)

    async def bring(
        self, ring: HeadRing, chains: Mapping[int, Sequence[KvBlock]], *, again: bool = False
    ) -> dict[int, list[KvBlock]]:
        """Have every device of ``ring`` hold the blocks of ``chains`` in its layers; return the prefix of each chain
        that all hold.

        Waits no longer than the transfer may take. ``again``: shortly after the first call, when the devices that
        computed the latest blocks may not have written them yet.
        """
        blocks = _blocks_of(chains)
        if not ring.keeps or not blocks or self._shares != _shares(ring.plan):
            return {}
        held = await self._bring(ring, blocks, verify=False)
        for pause_s in _LAST_WRITES_S if again else ():
            if lacking := [block for block in blocks if block.key not in held]:
                await asyncio.sleep(pause_s)
                held |= await self._bring(ring, lacking, verify=False)
        self._restores += not again
        return {
            request: self._to_begin_with(up_to_lacking(chain, lambda block: block.key in held))
            for request, chain in chains.items()
        }

    async def _bring(self, ring: HeadRing, blocks: Sequence[KvBlock], *, verify: bool) -> set[str]:
        if not blocks:
            return set()
        began_s = time.monotonic()
        sources, patience_s = await ring.sources(), self._patience_s(ring.plan, blocks)
        devices = [(name, _layers(ring.plan, name), sources.get(name, [])) for name in ring.plan.devices]
        held = await self._held_by_all(devices, blocks, patience_s, verify=verify)
        self._restore_s += time.monotonic() - began_s
        return {block.key for block in held}

    async def _held_by_all(
        self,
        devices: Iterable[tuple[str, Layers, list[Contact]]],
        blocks: Sequence[KvBlock],
        timeout_s: float,
        *,
        verify: bool,
    ) -> list[KvBlock]:
        """Return those of ``blocks`` that all ``devices`` have, or get from their sources in time, in their layers."""
        replies = await asyncio.gather(
            *(self._hold(name, blocks, layers, of, timeout_s, verify=verify) for name, layers, of in devices)
        )
        return [block for block, held in zip(blocks, zip(*replies, strict=True), strict=True) if all(held)]

    def _patience_s(self, plan: Plan, blocks: Sequence[KvBlock]) -> float:
        """Return twice the time that the slowest link takes for the device with the most data, longer if more tokens
        would be recomputed otherwise, within bounds."""
        tokens = sum(block.end - block.start for block in blocks)
        rates = [link.bytes_per_s for link in self._devices.book.between(plan.devices)]
        maximum = max(cell_bytes(plan, self._service.model.profile.layers, self._service.options.run.kv_type).values())
        rate, states = min(rates, default=1e9), sum(block.is_state for block in blocks)
        states_s = 2 * states * max(state_bytes(plan, self._service.model.profile.layers).values()) / rate
        return min(MAX_RESTORE_S, MIN_RESTORE_S + tokens * (WAITED_A_TOKEN_S + 2 * maximum / rate) + states_s)

    def serve(
        self,
        ring: HeadRing,
        sources: dict[str, list[Contact]],
        epoch: int,
        forecast: Forecast,
        blocks: Mapping[int, Sequence[KvBlock]],
    ) -> None:
        """Ring ``epoch`` serves from now on and resumes with ``blocks``: drop blocks that only the previous ring
        needed."""
        self._epoch, self._keeps, self._sources = epoch, ring.keeps, sources
        turning = forecast.context_tokens if turns_by_context(self._service.model.header) else 0
        computed: tuple[object, ...] = forecast.flash, turning
        self._shares = _shares(ring.plan)
        if self._shares:
            computed = *computed, self._shares, self._service.options.run.wire
        if forecast.small_windows:  # their attention sums in an order that depends on the tokens of a step
            computed = *computed, "small windows", self._service.step_tokens(forecast)
        if self._computed != computed:
            self._computed = computed
            self._roots.clear()
        self._layers = {name: _layers(ring.plan, name) for name in ring.plan.devices}
        has_cache = self._node.config.kv_cache is not None
        if not ring.keeps and self._service.options.block_tokens(has_cache=has_cache) is not None:
            self._report_once(
                "the KV cache is not saved, as not every device can; after a loss requests are recomputed whole"
            )
        needed = {block.key: block for chain in blocks.values() for block in chain}
        self._chunking = self._chunking_of(forecast) if ring.keeps else None
        if (predicted := forecast.prediction) is not None:
            self._prompt_token_s = predicted.prefill_chunk_s / predicted.chunk_rows
        self._copies = self._new_copies(ring, forecast) if ring.keeps else []
        self._drop([key for key in [*self._blocks, *self._begun] if key not in needed])
        self._need(needed.values(), 0)  # new replicas are notified with the next blocks: resuming comes first

    def _new_copies(self, ring: HeadRing, forecast: Forecast) -> list[_Copy]:
        copies = []
        for kept in self._replicas(ring, forecast):
            if kept.replica is None:
                self._report_once(f"the KV cache of {kept.device} is not replicated: {kept.why}")
            contacts = self._sources.get(kept.replica or "", [])
            source = [contact for contact in contacts if contact.device == kept.device]
            copies.append(_Copy(kept=kept, layers=self._layers[kept.device], source=source))
        return copies

    def _replicas(self, ring: HeadRing, forecast: Forecast) -> list[Kept]:
        options = self._service.options
        if options.kv_backup == 0:
            return []
        links, tokens_per_s = self._devices.book.rates(ring.plan.devices), forecast.tokens_per_s
        layers, kv_type = self._service.model.profile.layers, options.run.kv_type
        devices = holders(ring.profiles, token_bytes(ring.plan, layers, kv_type, links, tokens_per_s))
        is_asked = options.kv_backup is not None
        found = replicas(devices, ring.plan.head, links, tokens_per_s, always=is_asked)
        # A group without a device has other shares, unless another device takes its place.
        return [each for each in found if is_asked or not ring.plan.group_of(each.device)]

    def _report_once(self, line: str) -> None:
        if line not in self._reported:
            self._reported.add(line)
            self._reporter.report_line(line)

    # ---- requests ------------------------------------------------------------------------------------------------------

    def root(self, owner: str) -> str:
        """Return the root for the KV cache of requests of ``owner``; empty if it is not kept.

        Only this head can compute the keys, so that a device that holds the cache reveals nothing about a prompt.
        """
        if not self._keeps:
            return ""
        who = "" if self._service.options.share_prefixes else owner
        if who not in self._roots:
            if len(self._roots) >= MAX_ROOTS:
                self._roots.clear()
            model, options = self._service.model, self._service.options
            about = (
                model.stamp,
                options.run.kv_type,
                self._node.workspace.build,
                who,
                options.rope,
                *self._computed,
            )
            secret = self._node.identity.secret.encode()
            digest = hashlib.blake2b(msgspec.msgpack.encode(about), key=secret, digest_size=16)
            self._roots[who] = digest.hexdigest()
        return self._roots[who]

    async def find(self, prompt: Sequence[int], owner: str) -> tuple[str, list[KvBlock]]:
        """Return the root for the KV cache of ``prompt``, and the blocks that already exist for it.

        Blocks are looked up if there is a cache, unless a sequence of the ring has them.
        """
        root, epoch = self.root(owner), self._epoch
        if not root or self._chunking is None or self._node.config.kv_cache is None:
            return root, []
        blocks = prompt_blocks(self._chunking, prompt, root)[:-1]
        if self._has_states:
            blocks = [each for one in blocks for each in (one, state_behind(one))]
        own = await asyncio.to_thread(self._here, blocks)
        if all(block.key in self._blocks for block in own):
            return root, []
        found = await self._found(own)
        if epoch != self._epoch:  # another ring has other layers on its devices
            return self.root(owner), []
        self._need(found, len(prompt))
        self._news.set()
        self._found_tokens += found[-1].end if found else 0
        return root, found

    def _here(self, blocks: Iterable[KvBlock]) -> list[KvBlock]:
        """Return the blocks that this head has; the device that computed them may lack layers of other windows."""
        return self._to_begin_with(up_to_lacking(blocks, lambda block: bool(self._held.store.layers(block.key))))

    @property
    def _has_states(self) -> bool:
        """Whether the KV cache resumes only from a state."""
        return self._service.model.profile.is_recurrent

    def _to_begin_with(self, chain: list[KvBlock]) -> list[KvBlock]:
        """Return the part of ``chain`` that a sequence can be filled with."""
        return without_old_states(to_go_on_from(chain)) if self._has_states else chain

    async def _found(self, blocks: Sequence[KvBlock]) -> list[KvBlock]:
        """Return the blocks that every device has, or gets sooner than they could be computed."""
        patience_s = max(MIN_FIND_S, self._prompt_token_s * sum(block.end - block.start for block in blocks))
        devices = [(name, layers, self._sources.get(name, [])) for name, layers in self._layers.items()]
        try:
            held = set(await self._held_by_all(devices, blocks, patience_s, verify=True))
        except BaseException:
            self._drop([block.key for block in blocks if block.key not in self._blocks])
            raise
        found = self._to_begin_with(up_to_lacking(blocks, lambda block: block in held))
        self._lasting.update(block.key for block in blocks)
        self._drop([block.key for block in blocks if block not in found and block.key not in self._blocks])
        return found

    def _chunking_of(self, forecast: Forecast) -> Chunking:
        """Return the chunks into which the head's ring process cuts prompts."""
        size, controls = self.chunks(forecast), control_tokens(self._service.model.header)
        return Chunking(rows=size.rows, minimum=size.minimum, begins=lambda token: token in controls)

    def chunks(self, forecast: Forecast) -> ChunkSize:
        """Return the size of chunks of new prompts."""
        tokens = self._service.chunk_tokens(forecast)
        return ChunkSize(rows=tokens, minimum=min_rows(forecast.plan, tokens))

    def max_replayed(self, forecast: Forecast) -> int | None:
        """Return how many tokens of a request are recomputed one by one; None: all, as output must be exact."""
        if self._service.options.run.batching == "exact":
            return None
        per_s = forecast.tokens_per_s * forecast.batching.replays
        return int(self._service.options.exact_replay_s * per_s)

    # ---- figures -------------------------------------------------------------------------------------------------------

    def went_on(self, restored_tokens: int, again_tokens: int) -> None:
        """Count the tokens restored and recomputed for requests that this ring resumes from another one."""
        self._restored_tokens += restored_tokens
        self._again += again_tokens

    def status(self) -> KvStatus | None:
        """Return the state of replication; None without it."""
        if not self._keeps:
            return None
        return KvStatus(
            copies=[
                CopyStatus(device=copy.kept.device, replica=copy.kept.replica, why=copy.kept.why)
                for copy in self._copies
            ],
            replicated_bytes=sum(self._tokens(copy.held) * copy.kept.token_bytes for copy in self._copies),
            lag_tokens=max((max(self._tokens(copy.pending), len(copy.pending)) for copy in self._copies), default=0),
            restores=self._restores,
            restored_tokens=self._restored_tokens,
            restore_s=self._restore_s,
            computed_again_tokens=self._again,
            found_tokens=self._found_tokens,
        )

    def _tokens(self, keys: Iterable[str]) -> int:
        return sum(block.end - block.start for key in keys if (block := self._blocks.get(key)) is not None)


def _blocks_of(chains: Mapping[int, Sequence[KvBlock]]) -> list[KvBlock]:
    needed = map(without_old_states, chains.values())
    return list({block.key: block for chain in needed for block in chain}.values())[:MAX_BLOCKS]


def _layers(plan: Plan, device: str) -> Layers:
    """Return the layers of the windows of ``device``, or its share of them."""
    layers = [range(window.first, window.last) for _, window in plan.windows_of(device)]
    rank = next((number for number, rank in enumerate(plan.group_of(device)) if rank.device == device), 0)
    return [(own.start, own.stop) for own in (layers_of_rank(rank, each) for each in layers)]


def _shares(plan: Plan) -> list[_Shares]:
    return [
        (window.first, window.last, [rank.weight for rank in ranks])
        for window in plan.route
        if (ranks := plan.group_of(window.device))
    ]
