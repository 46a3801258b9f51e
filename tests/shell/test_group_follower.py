"""Later ranks of a group follow the first: they compute the steps of the ring's log with their shares of its layers."""

import socket
import threading

import numpy as np
import pytest

from primad.engine.llama.embedding import TokenEmbedding
from primad.engine.llama.windows import FirstWindow, MiddleWindow, TailWindow
from primad.engine.protocol import EngineOptions
from primad.errors import ProtocolError, RankError, RingError
from primad.gguf.header import read_header
from primad.gguf.share_rules import ShareRules
from primad.gguf.shares import share_header
from primad.gguf.windows import vocabulary_size
from primad.kv import kv_writer as kv_writers
from primad.kv.keys import block
from primad.kv.kv_writer import KvWriter
from primad.kv.store import KvStore
from primad.ring.group.exchange import RankExchange
from primad.ring.group.follower import GroupFollower
from primad.ring.group.frames import Direction, RankHello
from primad.ring.group.patience import PeerPatience
from primad.ring.group.peer import RankPeer
from primad.ring.messages import HIDDEN_DTYPE, PROTOCOL, KvCopy, KvKeep, KvLoad, KvRemove, Skip, Step, StepLimits
from primad.ring.worker import apply, rows_of, skipped, visit
from primad.system.wire import encode
from tests.shell.test_tensor_groups import opened
from tools import synth

OPTIONS = EngineOptions(context=256, sequences=2, rows=64, threads=1, batch_threads=1, kv_type="f16", lock=False)
PATIENCE_S = 600.0
"""Enough for slow machines and disks."""
LIMITS = StepLimits(ring=1, epoch=1, windows=frozenset((0, 1)), width=64, rows=64, context=256, sequences=2)
TOKENS = np.random.default_rng(0).integers(1, 250, 100).astype(np.int32)


BLOCK = block("root", None, TOKENS[:40].tolist(), [40])


def pair():
    """The exchanges of two connected ranks."""
    ends, hellos = socket.socketpair(), [RankHello.of(rank, 2) for rank in range(2)]
    exchanges = []
    for rank, end in enumerate(ends):
        own, other = hellos[rank], hellos[1 - rank]
        sends, receives = Direction(bytes(32), own, other), Direction(bytes(32), other, own)
        exchange = RankExchange(
            rank, [RankPeer(1 - rank, f"device {1 - rank}", end, sends, receives)], timeout_s=PATIENCE_S
        )
        exchange.patience = PeerPatience(PATIENCE_S, PATIENCE_S)
        exchanges.append(exchange)
    return exchanges


def step(number, count, position, sequence=0, ops=()):
    return Step(
        protocol=PROTOCOL,
        ring=1,
        epoch=1,
        step=number,
        window=0,
        dtype=HIDDEN_DTYPE,
        shape=(count, 64),
        positions=list(range(position, position + count)),
        sequences=[[sequence]] * count,
        outputs=[False] * (count - 1) + [True] * (count > 0),
        ops=list(ops),
    )


LOG = [
    step(0, 40, 0),
    step(1, 1, 40),
    step(2, 1, 40, 1, [KvCopy(0, 1, 40)]),  # the same token in a copied sequence
    step(3, 2, 41),
    step(4, 0, 0, ops=[KvRemove(0, 41, -1)]),
    step(5, 1, 41, 0),
    skipped(step(6, 1, 42, 0)),
    step(7, 1, 42, 0),
    step(8, 0, 0, ops=[KvKeep(0, BLOCK)]),
    step(9, 1, 40, 1, [KvLoad(1, BLOCK.key, BLOCK.end)]),
]


def windows_of(header, rank, folder, exchange, embedding):
    own = share_header(ShareRules(header), [1, 1], rank) if exchange is not None else header
    first = opened(own, 0, 2, folder / "first")
    first_window = (
        FirstWindow(first, OPTIONS, embedding, exchange) if rank == 0 else MiddleWindow(first, OPTIONS, exchange)
    )
    tail = TailWindow(
        opened(own, 2, 4, folder / "tail"),
        OPTIONS,
        frozenset(),
        vocabulary=vocabulary_size(header),
        embedding=embedding,
        exchange=exchange,
    )
    return {0: first_window, 1: tail}


def writer_of(windows, folder):
    return KvWriter(KvStore(folder), [shape for window in windows.values() for shape in window.kv_shapes])


def computed(windows, cells):
    """The logits of every step of the log, as a head computes them."""
    found, kv_writer = [], writer_of(windows, cells)
    for each in LOG:
        tokens = TOKENS[each.positions]
        following, content = visit(windows[0], each, tokens, kv_writer)
        apply(windows[1], following, kv_writer)
        if following.rows:
            windows[1].forward(rows_of(following, content))
            found.append(windows[1].logits(each.shape[0] - 1).copy())
    kv_writer.close()
    return found


@pytest.fixture(scope="module")
def header(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    synth.write_model(path, architecture="llama", quantisation="f32", layers=4)
    return read_header(path)


def test_a_step_of_the_first_rank_is_a_step_of_every_rank(header, tmp_path, monkeypatch):
    monkeypatch.setattr(kv_writers, "PATIENCE_S", PATIENCE_S)
    embedding, exchanges, ended = TokenEmbedding.of(header), pair(), []

    def follow():
        windows = windows_of(header, 1, tmp_path / "1", exchanges[1], embedding)
        kv_writer = writer_of(windows, tmp_path / "cells")
        follower = GroupFollower(windows, exchanges[1], LIMITS, kv_writer)
        try:
            while True:
                follower.turn()
        except RankError as exc:
            ended.append(str(exc))
        exchanges[1].close()
        kv_writer.close()
        for window in windows.values():
            window.release()

    thread = threading.Thread(target=follow)
    thread.start()
    windows = windows_of(header, 0, tmp_path / "0", exchanges[0], embedding)
    found = computed(windows, tmp_path / "cells")  # of both ranks, whose blocks differ by rank
    exchanges[0].close()
    thread.join()
    whole = windows_of(header, 0, tmp_path / "whole", None, embedding)
    expected = computed(whole, tmp_path / "whole-cells")
    assert np.array_equal(found[-1], found[2])
    for one, other in zip(found, expected, strict=True):
        assert np.abs(one[1:] - other[1:]).max() <= 1e-3 * np.abs(other[1:]).max()
    assert "device 0 of this group closed its connection" in ended[0]
    for window in (*windows.values(), *whole.values()):
        window.release()


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (encode(Skip(PROTOCOL, 1, 1, [3])), "not a step"),
        (encode(skipped(step(0, 65, 0))), "at most 64 rows"),
        (encode(step(0, 1, 400)), "position"),
        (b"\xc1", "not a step header"),
    ],
)
def test_an_invalid_step_is_not_computed(message, why):
    first, second = pair()
    first.lead(message)
    follower = GroupFollower({}, second, LIMITS)
    with pytest.raises(ProtocolError, match=why):
        follower.turn()
    first.close()
    second.close()


def test_a_follower_without_a_step_does_not_block(header):
    first, second = pair()
    assert not GroupFollower({}, second, LIMITS).turn()
    first.close()
    with pytest.raises(RingError, match="closed its connection"):
        GroupFollower({}, second, LIMITS).turn()
    second.close()
