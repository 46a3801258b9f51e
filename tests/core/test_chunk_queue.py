"""The queue assigns chunks to sources: whatever the sources do, every chunk arrives once and the fetch ends."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from primad.layers.chunk_queue import TREE, ChunkId, ChunkQueue

LAYERS = {"a": 3, "b": 1, "c": 5}
SOURCES = ("one", "two", "three")
IN_FLIGHT = 2


def queue(**held: str) -> ChunkQueue:
    """A queue of the chunks of layer ``a``; each source holds the layers in its string."""
    made = ChunkQueue(held, IN_FLIGHT)
    for source, digests in held.items():
        made.holds(source, digests)
    made.add("a", range(3))
    return made


def test_chunks_are_asked_for_in_order_and_a_few_at_a_time():
    chunks = queue(one="a")
    assert [chunks.take("one") for _ in range(3)] == [ChunkId("a", 0), ChunkId("a", 1), None]
    chunks.arrived("one", ChunkId("a", 0))
    assert chunks.take("one") == ChunkId("a", 2)


def test_two_sources_share_the_chunks():
    chunks = queue(one="a", two="a")
    assert [chunks.take(source) for source in ("one", "two", "one")] == [ChunkId("a", number) for number in range(3)]


def test_a_source_is_asked_only_for_what_it_holds():
    chunks = queue(one="b", two="a")
    chunks.add("b", [TREE])
    assert chunks.take("one") == ChunkId("b", TREE)
    assert chunks.take("one") is None


def test_a_source_that_was_not_reached_is_asked_for_nothing_and_may_hold_all():
    chunks = ChunkQueue(["one"], IN_FLIGHT)
    chunks.add("a", [0])
    assert chunks.take("one") is None
    assert chunks.unavailable() == []
    chunks.holds("one", "b")
    assert chunks.unavailable() == ["a"]


def test_chunks_that_a_dropped_source_owes_go_to_the_others_first():
    chunks = queue(one="a", two="a")
    chunks.add("c", range(5))
    assert [chunks.take("one"), chunks.take("one")] == [ChunkId("a", 0), ChunkId("a", 1)]
    chunks.drop("one")
    assert {chunks.take("two"), chunks.take("two")} == {ChunkId("a", 0), ChunkId("a", 1)}
    assert chunks.take("one") is None


def test_an_answer_that_was_not_asked_for_is_none():
    chunks = queue(one="a", two="a")
    chunks.take("one")
    assert chunks.is_asked("one", ChunkId("a", 0))
    assert not chunks.is_asked("two", ChunkId("a", 0))
    assert not chunks.is_asked("one", ChunkId("c", 0))
    chunks.arrived("one", ChunkId("a", 0))
    assert not chunks.is_asked("one", ChunkId("a", 0)), "it came before"


def test_a_source_that_refuses_a_layer_is_not_asked_for_it_again():
    chunks = queue(one="ac", two="c")
    chunks.add("c", [0])
    assert chunks.take("one") == ChunkId("a", 0)
    assert chunks.take("one") == ChunkId("a", 1)
    chunks.refused("one", ChunkId("a", 0))
    assert chunks.unavailable() == ["a"]
    assert chunks.take("one") == ChunkId("c", 0)
    assert chunks.is_asked("one", ChunkId("a", 1)), "its other answers may still come"


def test_without_sources_everything_is_unavailable():
    chunks = queue()
    assert chunks.unavailable() == ["a"]


class Fetching(RuleBasedStateMachine):
    """Sources that answer, stall, refuse and fail in any order."""

    @initialize(held=st.fixed_dictionaries({source: st.sets(st.sampled_from(sorted(LAYERS))) for source in SOURCES}))
    def begin(self, held) -> None:
        self.held = held
        self.chunks = ChunkQueue(SOURCES, IN_FLIGHT)
        self.owed: dict[str, list[ChunkId]] = {source: [] for source in SOURCES}
        self.reached: set[str] = set()
        self.dead: set[str] = set()
        self.arrived: Counter[ChunkId] = Counter()
        self.wanted = {ChunkId(digest, number) for digest, count in LAYERS.items() for number in range(count)}
        for digest, count in LAYERS.items():
            self.chunks.add(digest, range(count))

    def living(self) -> list[str]:
        return sorted(self.reached - self.dead)

    @rule(source=st.sampled_from(SOURCES))
    def reach(self, source) -> None:
        if source not in self.reached | self.dead:
            self.reached.add(source)
            self.chunks.holds(source, self.held[source])

    @rule(source=st.sampled_from(SOURCES))
    def ask(self, source) -> None:
        piece = self.chunks.take(source)
        if piece is None:
            return
        assert source in self.living()
        assert piece.digest in self.held[source]
        assert piece not in self.arrived
        assert not any(piece in owed for owed in self.owed.values()), "it is asked of one source at a time"
        self.owed[source].append(piece)

    @rule(source=st.sampled_from(SOURCES), at=st.integers(0, IN_FLIGHT - 1))
    def answer(self, source, at) -> None:
        if at < len(self.owed[source]):
            piece = self.owed[source].pop(at)
            assert self.chunks.is_asked(source, piece)
            self.chunks.arrived(source, piece)
            self.arrived[piece] += 1

    @rule(source=st.sampled_from(SOURCES))
    def die(self, source) -> None:
        self.dead.add(source)
        self.owed[source] = []
        self.chunks.drop(source)

    @rule(source=st.sampled_from(SOURCES))
    def lie(self, source) -> None:
        if self.owed[source]:
            assert self.chunks.is_asked(source, self.owed[source][0])
            self.die(source)

    @precondition(lambda self: self.living())
    @rule(data=st.data())
    def refuse(self, data) -> None:
        source = data.draw(st.sampled_from(self.living()))
        if self.owed[source]:
            piece = self.owed[source].pop(0)
            self.chunks.refused(source, piece)
            self.held[source] = self.held[source] - {piece.digest}

    @invariant()
    def every_chunk_arrives_at_max_once(self) -> None:
        assert set(self.arrived.values()) <= {1}
        assert self.arrived.keys() <= self.wanted

    @invariant()
    def few_are_in_flight(self) -> None:
        for source in SOURCES:
            assert self.chunks.under_way(source) == len(self.owed[source]) <= IN_FLIGHT

    def teardown(self) -> None:
        """From any state, live sources deliver all that they hold, and the rest is reported unavailable."""
        if not hasattr(self, "chunks"):
            return
        for source in SOURCES:
            self.reach(source)
        for _ in range(10 * len(self.wanted)):
            for source in self.living():
                self.ask(source)
                self.answer(source, 0)
        given = set().union(*(self.held[source] for source in self.living()))
        left = {piece.digest for piece in self.wanted - self.arrived.keys()}
        assert left.isdisjoint(given)
        assert set(self.chunks.unavailable()) == left
        self.every_chunk_arrives_at_max_once()


TestFetching = Fetching.TestCase
TestFetching.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@settings(deadline=None)
@given(st.lists(st.sampled_from(SOURCES), max_size=40))
def test_one_source_alone_is_asked_for_each_chunk_once(asks):
    chunks = ChunkQueue(["one"], IN_FLIGHT)
    chunks.holds("one", LAYERS)
    for digest, count in LAYERS.items():
        chunks.add(digest, range(count))
    seen = []
    for _ in asks:
        piece = chunks.take("one")
        if piece is not None:
            seen.append(piece)
            chunks.arrived("one", piece)
    assert len(seen) == len(set(seen)) == min(len(asks), sum(LAYERS.values()))
