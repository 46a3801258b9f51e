"""A joiner tries its code on every device that announces its number, even liars: each gets one guess."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from primad.daemon import pairing_service
from primad.errors import ClusterError, PrimadError
from primad.network.peer import Peer
from primad.settings.config import load_config
from primad.trust import pairing_links
from primad.trust.identity import load_identity
from primad.trust.local_trust import LocalTrust
from primad.trust.pairing import MAX_TRIES, Inviter, Prove, Refuse, encode
from primad.trust.trust import TrustedDevice, TrustStore
from primad.trust.words import Code
from tests.shell.test_pairing_links import CODE, DESK, HOST, invited

WRONG = Code(7, "lamp", "stone")
SLOW = encode(Refuse(why="slow"))

Reply = Callable[[bytes], bytes | None]


class Joining:
    """A device that is given ``CODE``, with the devices that it sees."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.printed: list[str] = []
        self.peers: list[Peer] = []
        config, identity = load_config({"home": home, "name": "pi", "cluster": "home"}, {}), load_identity(home)
        self.trust = TrustStore(home, identity, LocalTrust(home / "local"))
        self._node = SimpleNamespace(config=config, identity=identity, trust=self.trust)
        monkeypatch.setattr(pairing_service, "look", self._look)
        monkeypatch.setattr(pairing_service, "BETWEEN_TRIES_S", 0.0)
        monkeypatch.setattr(pairing_links, "REPLY_S", 0.0)

    def sees(self, *ports: int, addresses: tuple[str, ...] = (HOST,)) -> None:
        """Add devices that announce the number of ``CODE``."""
        fields = {"cluster": "home", "role": "head", "version": "1", "protocol": 2, "port": 1, "key": DESK.key}
        self.peers += [
            Peer(device=f"d{port}", addresses=addresses, pairing=(CODE.number, port), **fields) for port in ports
        ]

    async def pairs(self, at: str | None = None) -> str:
        """Pair; returns the key that is trusted."""
        return (await pairing_service.pair(self._node, str(CODE), at, self.printed.append, "head")).key

    async def _look(self, *_: object) -> list[Peer]:
        return self.peers


@pytest.fixture
def joining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Joining:
    return Joining(tmp_path, monkeypatch)


class Liar:
    """Poses as the inviter, sends a guess at the code (or ``first`` instead), and counts what it receives."""

    def __init__(self, after_proof: bytes | None, first: bytes | None = None) -> None:
        self.starts = self.proofs = 0
        self._after_proof, self._first = after_proof, first

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        async with await asyncio.start_server(self._serve, HOST, 0) as server:
            yield server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._lie(reader, writer)
        except EOFError:
            pass
        finally:
            writer.close()

    async def _lie(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inviter = Inviter(WRONG, DESK, 0.0)
        reply, _ = inviter.receive(0, await pairing_links._read_frame(reader), 0.0)
        self.starts += 1
        writer.write(pairing_links._framed(self._first or reply))
        await pairing_links._read_frame(reader)
        self.proofs += 1
        if self._after_proof is not None:
            writer.write(pairing_links._framed(self._after_proof))


AFTER_PROOF = {
    "slow": SLOW,
    "wrong": encode(Refuse(why="wrong", number=4)),
    "a proof": encode(Prove(b"", bytes(32))),
    "nothing": None,
}


@pytest.mark.parametrize("after_proof", AFTER_PROOF.values(), ids=AFTER_PROOF.keys())
async def test_a_liar_gets_one_proof_per_command_and_five_in_total(joining: Joining, after_proof: bytes | None):
    async with asyncio.timeout(60):
        liar = Liar(after_proof)
        async with liar.listening() as port:
            joining.sees(port)
            for number in range(MAX_TRIES + 3):
                with pytest.raises(ClusterError) as error:
                    await joining.pairs(f"{HOST}:{port}" if number % 2 else None)
                assert liar.proofs == min(number + 1, MAX_TRIES)
            assert "was tried 5 times" in str(error.value)
            assert joining.trust.entries() == []


async def test_a_device_that_delays_a_joiner_is_not_tried_again_before_a_pause(
    joining: Joining, monkeypatch: pytest.MonkeyPatch
):
    """Not sooner, whatever wait it names: here the joiner's patience ends before."""
    monkeypatch.setattr(pairing_service, "PATIENCE_S", 0.3)
    async with asyncio.timeout(60):
        liar = Liar(None, first=SLOW)
        async with liar.listening() as port:
            with pytest.raises(ClusterError, match=r"no device took it within 0\.3 s"):
                await joining.pairs(f"{HOST}:{port}")
        assert (liar.starts, liar.proofs) == (1, 0)


async def test_many_liars_get_five_proofs_in_total(joining: Joining):
    async with asyncio.timeout(60):
        liars = [Liar(SLOW) for _ in range(MAX_TRIES + 2)]
        async with AsyncExitStack() as stack:
            joining.sees(*[await stack.enter_async_context(liar.listening()) for liar in liars])
            with pytest.raises(ClusterError, match="was tried 5 times"):
                await joining.pairs()
        assert sum(liar.proofs for liar in liars) == MAX_TRIES
        assert max(liar.proofs for liar in liars) == 1


@pytest.mark.parametrize("names_ours", [False, True], ids=["by itself", "and names the right one's address as well"])
async def test_after_a_liar_the_next_device_that_announces_the_code_is_tried(
    joining: Joining, monkeypatch: pytest.MonkeyPatch, names_ours: bool
):
    monkeypatch.setattr(pairing_service.random, "shuffle", lambda _: None)
    async with asyncio.timeout(60):
        liar = Liar(SLOW)
        async with liar.listening() as port, invited() as desk:
            joining.sees(port, addresses=(HOST, "localhost") if names_ours else (HOST,))
            joining.sees(desk.port)
            assert await joining.pairs() == DESK.key
            assert liar.proofs == 1
            assert any("another device announces this code and is tried" in line for line in joining.printed)
            assert [each.key for each in joining.trust.entries()] == [DESK.key]


async def test_one_that_announces_itself_later_is_tried_as_well(joining: Joining, monkeypatch: pytest.MonkeyPatch):
    async with asyncio.timeout(60):
        liar = Liar(SLOW)
        async with liar.listening() as port, invited() as desk:
            joining.sees(port)

            async def later(*_: object) -> list[Peer]:
                seen = list(joining.peers)
                if len(seen) == 1:
                    joining.sees(desk.port)
                return seen

            monkeypatch.setattr(pairing_service, "look", later)
            assert await joining.pairs() == DESK.key


async def test_a_device_that_lists_dead_addresses_takes_only_its_turn(
    joining: Joining, monkeypatch: pytest.MonkeyPatch
):
    """It lists the right device's address last, which is not rejected for that."""
    reach = pairing_service.pair_with

    async def silent(host: str, *arguments: Any) -> TrustedDevice:
        if host != HOST:
            monkeypatch.setattr(pairing_service, "TURN_S", 60.0)  # the turn of the device that replies
            await asyncio.Event().wait()
        return await reach(host, *arguments)

    monkeypatch.setattr(pairing_service, "pair_with", silent)
    monkeypatch.setattr(pairing_service, "TURN_S", 0.2)
    monkeypatch.setattr(pairing_service.random, "shuffle", lambda _: None)
    async with asyncio.timeout(60):
        async with invited() as desk:
            joining.sees(desk.port, addresses=("192.0.2.1", HOST))
            joining.sees(desk.port)
            assert await joining.pairs() == DESK.key
            assert any("does not respond within 60 s; another device" in line for line in joining.printed)


async def test_a_wrong_code_costs_the_right_device_one_try(joining: Joining):
    async with asyncio.timeout(60):
        async with invited() as desk:
            joining.sees(desk.port, addresses=(HOST, "localhost"))
            with pytest.raises(PrimadError, match="4 tries are left"):
                await pairing_service.pair(joining._node, str(WRONG), None, joining.printed.append, "head")
