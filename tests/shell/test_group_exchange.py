"""The exchange of a group over real connections: equal totals on all ranks, and one clear error where a rank fails."""

import socket
import struct
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primad.errors import RankError, RingError
from primad.ring.group.connect import GroupListener, connect_group
from primad.ring.group.exchange import SLICED_BYTES, RankExchange
from primad.ring.group.frames import FRAME_BYTES, FRAME_ROOM, PART, TOTAL, Direction, RankHello
from primad.ring.group.patience import KNOWN_STEPS, MIN_S, SPIN_S, PeerPatience
from primad.ring.group.peer import RankPeer
from primad.ring.group.place import GroupPlace
from primad.ring.messages import GroupRank, JoinGroup, RankAddress
from primad.settings.config import any_host

KEY = bytes(range(32))


def linked(ranks, timeout_s=20.0, *, halves=False):
    """The exchanges of all ranks, connected by socket pairs."""
    peers, hellos = [[] for _ in range(ranks)], [RankHello.of(rank, ranks) for rank in range(ranks)]
    for one in range(ranks):
        for other in range(one):
            ends = socket.socketpair()
            for (mine, theirs), end in zip(((one, other), (other, one)), ends, strict=True):
                sends, receives = (
                    Direction(KEY, hellos[mine], hellos[theirs]),
                    Direction(KEY, hellos[theirs], hellos[mine]),
                )
                peers[mine].append(RankPeer(theirs, f"device {theirs}", end, sends, receives))
    return [RankExchange(rank, each, timeout_s=timeout_s, halves=halves) for rank, each in enumerate(peers)]


def together(exchanges, run):
    """What ``run(rank, exchange)`` returns or raises on each rank, each in its own thread."""
    results = [None] * len(exchanges)

    def rank(number):
        try:
            results[number] = run(number, exchanges[number])
        except RingError as exc:
            results[number] = exc
            exchanges[number].close()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(exchanges))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@settings(max_examples=15)
@given(st.integers(2, 4), st.lists(st.integers(1, 3000), min_size=1, max_size=4), st.booleans())
def test_totals_are_those_in_the_order_of_ranks_on_every_rank(ranks, counts, is_large):
    counts = [count + SLICED_BYTES * is_large for count in counts]
    noise = np.random.default_rng(sum(counts))
    parts = [[noise.standard_normal(count).astype(np.float32) for _ in range(ranks)] for count in counts]
    exchanges = linked(ranks)

    def run(rank, exchange):
        own = [each[rank].copy() for each in parts]
        for values in own:
            exchange.sum(values)
        return own

    results = together(exchanges, run)
    for number, each in enumerate(parts):
        total = each[0]
        for part in each[1:]:
            total = total + part
        for rank in range(ranks):
            assert np.array_equal(results[rank][number], total)
    for exchange in exchanges:
        exchange.close()


def bytes_of(values):
    return values.data.cast("B")


def test_a_total_goes_out_while_parts_are_still_on_their_way():
    first, second = linked(2)
    (peer,) = second._peers
    ones = np.ones(FRAME_BYTES // 4, np.float32)
    found, rest = np.empty_like(ones), np.empty_like(ones)
    part = np.empty(2 * len(ones), np.float32)

    def run(rank, exchange):
        if rank == 0:
            exchange.sum(values := np.ones(4 * len(ones), np.float32))
            return values
        peer.send(PART, bytes_of(ones))
        peer.expect(PART, bytes_of(part))
        peer.expect(TOTAL, bytes_of(found))
        exchange._run()  # the other rank has half of a part
        peer.send(PART, bytes_of(ones))
        peer.send(TOTAL, bytes_of(np.full(2 * len(ones), 2, np.float32)))
        peer.expect(TOTAL, bytes_of(rest))
        exchange._run()
        return np.concatenate([found, rest])

    results = together([first, second], run)
    assert [len(each) for each in results] == [4 * len(ones), 2 * len(ones)]
    assert all((each == 2).all() for each in results)
    for exchange in (first, second):
        exchange.close()


@pytest.mark.parametrize("count", [100, SLICED_BYTES])
def test_totals_of_parts_in_16_bits_are_equal_on_every_rank_and_within_rounding(count):
    noise = np.random.default_rng(count)
    parts = [noise.standard_normal(count).astype(np.float32) * 10.0 ** noise.integers(-3, 5, count) for _ in range(3)]
    exchanges = linked(3, halves=True)

    def run(rank, exchange):
        own = parts[rank].astype(np.float32)
        exchange.sum(own)
        return own

    first, *others = together(exchanges, run)
    assert all(np.array_equal(first, each) for each in others)
    sizes = sum(np.abs(each) for each in parts)
    assert (np.abs(first - sum(parts)) <= 1e-3 * sizes + 2e-6).all()
    for exchange in exchanges:
        exchange.close()


def test_the_first_rank_has_the_logits_of_all():
    exchanges = linked(3)
    results = together(exchanges, lambda rank, exchange: exchange.gather(np.full(5 + rank, rank, np.float32)))
    assert [len(each) for each in results[0]] == [5, 6, 7]
    assert [each[0] for each in results[0]] == [0, 1, 2]
    assert results[1:] == [[], []]
    for exchange in exchanges:
        exchange.close()


def test_a_part_of_another_shape_is_one_clear_error():
    exchanges = linked(2)
    results = together(exchanges, lambda rank, exchange: exchange.sum(np.zeros(10 + rank, np.float32)))
    assert "device 1 of this group sent 44 bytes of kind 2 where 40 of kind 2 were due" in str(results[0])
    assert isinstance(results[1], RankError)
    assert results[1].device == "device 0"


def test_a_rank_that_listens_everywhere_is_reached_at_any_address():
    listener = GroupListener(any_host())
    with socket.create_connection(("127.0.0.1", listener.address[1]), timeout=20) as connection:
        accepted = listener.accept(time.monotonic() + 20)
        assert accepted.getpeername()[1] == connection.getsockname()[1]
        accepted.close()
    listener.close()


def test_a_vanished_rank_is_named():
    exchanges = linked(3)
    exchanges[1].close()
    results = together([exchanges[0], exchanges[2]], lambda _, exchange: exchange.sum(np.zeros(10, np.float32)))
    assert "device 1 of this group" in str(results[0]) or "device 2 of this group closed" in str(results[0])
    assert all(isinstance(each, RankError) for each in results)


def test_a_rank_that_is_late_is_named():
    first, second = linked(2, timeout_s=0.01)
    with pytest.raises(RankError, match=r"device 1 of this group did not give its part within 0\.01 s"):
        first.sum(np.zeros(10, np.float32))
    second.close()
    first.close()


def test_a_silent_rank_is_late_long_before_a_step_is():
    patience = PeerPatience(timeout_s=60)
    for step in range(KNOWN_STEPS):
        patience.begin(step)
        assert patience.until(step, step) == step + 60, "it may read its weights"
        patience.ended(step, step + 0.001)
    patience.begin(10)
    assert patience.until(10.001, 10.001) == pytest.approx(10.001 + MIN_S)
    assert patience.until(10.001, 12) == pytest.approx(12 + MIN_S), "data came in the meantime"
    assert patience.until(12, 12) == pytest.approx(12 + 8 * 2, abs=0.1), "others compute about as long as this rank"
    patience.ended(12, 15)
    assert patience.until(15.1, 15.1) == pytest.approx(15.1 + 8 * 3.1), "others took as long of late"
    assert patience.until(100, 100) == 160


def test_a_rank_that_polled_in_vain_sleeps_at_once_until_waits_are_short_again():
    patience = PeerPatience(timeout_s=60)
    patience.ended(0, SPIN_S)
    assert patience.spin_s == SPIN_S
    patience.ended(1, 1 + 3 * SPIN_S)
    assert patience.spin_s == 0
    patience.ended(2, 2 + SPIN_S)
    assert patience.spin_s == SPIN_S


def sealed(hellos, content):
    """The first frame from rank 1 to rank 0."""
    return bytearray(Direction(KEY, hellos[1], hellos[0]).seal(PART, content, memoryview(bytearray(FRAME_ROOM))))


@pytest.mark.parametrize("at", [0, 5, 9, 40])
def test_a_changed_byte_is_not_believed(at):
    ends, hellos = socket.socketpair(), [RankHello.of(rank, 2) for rank in range(2)]
    frame = sealed(hellos, bytes(40))
    frame[at] ^= 1
    ends[1].sendall(frame)
    peer = RankPeer(1, "mini", ends[0], Direction(KEY, *hellos), Direction(KEY, *hellos[::-1]))
    with pytest.raises(RankError, match="mini of this group sent"):
        RankExchange(0, [peer], timeout_s=5).sum(np.zeros(10, np.float32))
    for end in ends:
        end.close()


def test_a_replayed_frame_is_rejected():
    ends, hellos = socket.socketpair(), [RankHello.of(rank, 2) for rank in range(2)]
    frame = sealed(hellos, struct.pack("<f", 1))
    ends[1].sendall(frame + frame)
    peer = RankPeer(1, "mini", ends[0], Direction(KEY, *hellos), Direction(KEY, *hellos[::-1]))
    exchange, values = RankExchange(0, [peer], timeout_s=5), np.ones(1, np.float32)
    exchange.sum(values)
    assert values == [2]
    with pytest.raises(RankError, match="a frame that it did not seal"):
        exchange.sum(values)
    for end in ends:
        end.close()


def groups(ranks, keys, *, before=None):
    """The result of ``connect_group`` with each rank's key, each in its own thread."""
    listeners = [GroupListener("127.0.0.1") for _ in range(ranks)]
    addresses = {rank: listener.address for rank, listener in enumerate(listeners)}
    if before is not None:
        before(addresses[0])
    names = [f"device {rank}" for rank in range(ranks)]

    def run(rank, listener):
        timeout_s = 20.0 if keys[rank] == keys[0] == keys[-1] else 0.5
        return connect_group(rank, names, listener, addresses, keys[rank], connect_timeout_s=timeout_s, timeout_s=20.0)

    results = together(listeners, run)
    for listener in listeners:
        listener.close()
    return results


def test_ranks_connect_to_each_other_though_strangers_come_first():
    strangers = []

    def come(address):
        for garbage in (
            b"",
            b"GET / HTTP/1.1\r\nHost: a very long and friendly name\r\n\r\n",
            RankHello.of(1, 3).packed() + bytes(24),
        ):
            stranger = socket.create_connection(address)
            stranger.sendall(garbage)
            strangers.append(stranger)
        strangers[0].close()

    exchanges = groups(3, [KEY] * 3, before=come)
    values = together(exchanges, lambda _, exchange: (each := np.ones(7, np.float32), exchange.sum(each))[0])
    assert all(np.array_equal(each, np.full(7, 3)) for each in values)
    for each in (*exchanges, *strangers):
        each.close()


def test_a_rank_with_another_key_is_not_of_the_group():
    results = groups(2, [KEY, bytes(32)])
    assert "device 1 of this group did not connect in time" in str(results[0])
    assert "device 0 of this group at 127.0.0.1 is not who it should be" in str(results[1])
    assert [each.device for each in results] == ["device 1", "device 0"]


def test_a_place_stands_for_the_exchange_until_all_ranks_are_connected():
    places = [
        GroupPlace(GroupRank(rank=rank, devices=["desk", "mini"], key=KEY), "127.0.0.1", timeout_s=20.0)
        for rank in range(2)
    ]
    with pytest.raises(RingError, match="before the devices of this group were connected"):
        places[0].lead(b"a step")
    with pytest.raises(RingError, match="rank 1 of a group was given 0 addresses"):
        places[1].join(JoinGroup([]))
    port = int(places[0].endpoint.rsplit(":", 1)[1])
    joins = [JoinGroup([]), JoinGroup([RankAddress("127.0.0.1", port)])]
    together(places, lambda rank, place: place.join(joins[rank]))
    values = together(places, lambda _, place: (each := np.ones(7, np.float32), place.sum(each))[0])
    assert all(np.array_equal(each, np.full(7, 2)) for each in values)
    with pytest.raises(RingError, match="or twice"):
        places[0].join(JoinGroup([]))
    for place in places:
        place.close()


def test_large_parts_are_sealed_in_pieces():
    one, other = (RankHello.of(rank, 2) for rank in range(2))
    ends = socket.socketpair()
    peer = RankPeer(1, "mini", ends[0], Direction(KEY, one, other), Direction(KEY, other, one))
    peer.send(PART, memoryview(bytes(2 * FRAME_BYTES + 1)))
    assert len(peer._out) == 3
    for end in ends:
        end.close()
