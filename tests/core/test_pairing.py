"""Pairing as pure functions: bytes of one side are passed to the other, and time is a number."""

from __future__ import annotations

import collections
from typing import get_args

import msgspec
import pytest

from primad.errors import ClusterError, ConfigError, PrimadError, ProtocolError
from primad.trust.identity import new_identity
from primad.trust.pairing import (
    BETWEEN_TRIES_S,
    LIFETIME_S,
    MAX_BYTES,
    MAX_TRIES,
    RUN_S,
    Accept,
    Answer,
    CodeOutcome,
    Inviter,
    Joiner,
    Later,
    Prove,
    RefusalReason,
    Refuse,
    Start,
    Who,
)
from primad.trust.words import WORDS, Code, new_code, parse_code

CODE = Code(7, "lamp", "river")
OTHER = Code(7, "lamp", "stone")
DESK = Who(device="desk", key=new_identity().public, cluster="home", version="0.1")
PI = Who(device="pi", key=new_identity().public, cluster="home", version="0.2")


def run(inviter: Inviter, joiner: Joiner, now: float = 0.0, peer: str = "a") -> tuple[Who | Later, Who | None]:
    """Exchange all messages; what each side finally knows of the other."""
    message: bytes | Who | Later = joiner.start()
    proven = None
    while isinstance(message, bytes):
        reply, proven = inviter.receive(peer, message, now)
        message = joiner.receive(reply)
    return message, proven


def wrong_run(inviter: Inviter, now: float, peer: str = "a") -> str:
    """A run with a wrong code; the error that the joiner gets."""
    with pytest.raises(ClusterError) as refusal:
        run(inviter, Joiner(OTHER, PI), now, peer)
    return str(refusal.value)


def answered(inviter: Inviter, joiner: Joiner, now: float = 0.0, peer: str = "a") -> bytes:
    """The joiner's proof, not yet passed to the inviter."""
    reply, _ = inviter.receive(peer, joiner.start(), now)
    proof = joiner.receive(reply)
    assert isinstance(proof, bytes)
    return proof


def test_two_devices_with_the_same_code_learn_each_others_identity():
    inviter = Inviter(CODE, DESK, 0.0)
    assert inviter.outcome(0.0) is None
    assert run(inviter, Joiner(CODE, PI)) == (DESK, PI)
    assert inviter.outcome(0.0) is CodeOutcome.USED


def test_a_code_is_good_once():
    inviter = Inviter(CODE, DESK, 0.0)
    run(inviter, Joiner(CODE, PI))
    with pytest.raises(ClusterError, match="was used or has expired"):
        run(inviter, Joiner(CODE, PI), 5.0)


def test_wrong_codes_get_the_number_of_tries_left_and_burn_the_code():
    inviter = Inviter(CODE, DESK, 0.0)
    for number in range(MAX_TRIES - 1):
        assert f"({MAX_TRIES - 1 - number} tries are left)" in wrong_run(inviter, number)
    assert "the code is invalid" in wrong_run(inviter, MAX_TRIES)
    assert inviter.outcome(MAX_TRIES) is CodeOutcome.BURNT
    with pytest.raises(ClusterError, match="the code is invalid"):
        run(inviter, Joiner(CODE, PI), 99.0)


def test_a_run_that_is_broken_off_counts_as_a_try():
    inviter = Inviter(CODE, DESK, 0.0)
    for number in range(MAX_TRIES):
        inviter.receive("a", Joiner(OTHER, PI).start(), number)
        inviter.forget("a")
    assert inviter.outcome(MAX_TRIES) is CodeOutcome.BURNT


def test_the_last_try_may_still_prove_itself():
    inviter = Inviter(CODE, DESK, 0.0)
    for number in range(MAX_TRIES - 1):
        wrong_run(inviter, number)
    joiner = Joiner(CODE, PI)
    proof = answered(inviter, joiner, 10.0)
    assert inviter.outcome(10.0) is None
    assert inviter.wake_at() == 10.0 + RUN_S
    reply, identity = inviter.receive("a", proof, 11.0)
    assert identity == PI
    assert joiner.receive(reply) == DESK


def test_a_run_that_nobody_finishes_ends_and_then_the_code_is_burnt():
    inviter = Inviter(CODE, DESK, 0.0)
    for number in range(MAX_TRIES):
        proof = answered(inviter, Joiner(CODE, PI), number, peer=str(number))
    assert inviter.outcome(MAX_TRIES) is None
    late = MAX_TRIES + RUN_S
    assert inviter.outcome(late) is CodeOutcome.BURNT
    assert inviter.receive(str(MAX_TRIES - 1), proof, late)[1] is None


def test_one_try_a_second_counts_for_all_peers_together():
    inviter = Inviter(CODE, DESK, 0.0)
    wrong_run(inviter, 0.0, peer="a")
    found, proven = run(inviter, Joiner(CODE, PI), 0.25, peer="b")
    assert found == Later()
    assert proven is None
    assert run(inviter, Joiner(CODE, PI), BETWEEN_TRIES_S, peer="b") == (DESK, PI)


def test_runs_do_not_disturb_each_other():
    inviter = Inviter(CODE, DESK, 0.0)
    joiner = Joiner(CODE, PI)
    proof = answered(inviter, joiner, peer="right")
    wrong_run(inviter, 1.0, peer="wrong")
    reply, identity = inviter.receive("right", proof, 2.0)
    assert identity == PI
    assert joiner.receive(reply) == DESK


def test_a_code_has_its_time():
    inviter = Inviter(CODE, DESK, 5.0)
    proof = answered(inviter, Joiner(CODE, PI), LIFETIME_S + 4.9)
    assert inviter.receive("a", proof, LIFETIME_S + 5)[1] is None
    assert inviter.outcome(LIFETIME_S + 5) is CodeOutcome.EXPIRED
    with pytest.raises(ClusterError, match="has expired"):
        run(inviter, Joiner(CODE, PI), LIFETIME_S + 5)


def test_a_recorded_run_is_worth_nothing_later():
    inviter = Inviter(CODE, DESK, 0.0)
    joiner = Joiner(CODE, PI)
    proof = answered(inviter, joiner)
    inviter.forget("a")
    assert inviter.receive("a", proof, 1.0)[1] is None  # the run is over
    inviter.receive("b", joiner.start(), 2.0)
    reply, identity = inviter.receive("b", proof, 2.0)  # another element of the inviter, hence another key
    assert identity is None
    assert msgspec.msgpack.decode(reply, type=Refuse).why == "wrong"


@pytest.mark.parametrize("changed", ["who", "proof", "name only"])
def test_messages_of_the_joiner_cannot_be_changed_in_transit(changed: str):
    inviter = Inviter(CODE, DESK, 0.0)
    prove = msgspec.msgpack.decode(answered(inviter, Joiner(CODE, PI)), type=Prove)
    mallory = msgspec.structs.replace(PI, key=new_identity().public)
    match changed:
        case "who":
            prove = Prove(msgspec.msgpack.encode(mallory), prove.proof)
        case "name only":
            prove = Prove(prove.who.replace(b"pi", b"po"), prove.proof)
        case _:
            prove = Prove(prove.who, bytes([prove.proof[0] ^ 1]) + prove.proof[1:])
    assert inviter.receive("a", msgspec.msgpack.encode(prove), 0.0)[1] is None


def test_messages_of_the_inviter_cannot_be_changed_in_transit():
    inviter, joiner = Inviter(CODE, DESK, 0.0), Joiner(CODE, PI)
    reply, _ = inviter.receive("a", answered(inviter, joiner), 0.0)
    accept = msgspec.msgpack.decode(reply, type=Accept)
    mallory = msgspec.msgpack.encode(msgspec.structs.replace(DESK, key=new_identity().public))
    with pytest.raises(ClusterError, match="does not know the code itself"):
        joiner.receive(msgspec.msgpack.encode(Accept(mallory, accept.proof)))


def test_an_inviter_that_does_not_know_the_code_is_not_trusted():
    with pytest.raises(ClusterError, match="wrong code"):
        run(Inviter(OTHER, DESK, 0.0), Joiner(CODE, PI))
    joiner = Joiner(CODE, PI)
    answered(Inviter(OTHER, DESK, 0.0), joiner)
    with pytest.raises(ClusterError, match="does not know the code itself"):
        joiner.receive(msgspec.msgpack.encode(Accept(msgspec.msgpack.encode(DESK), bytes(32))))


def test_a_joiner_that_gets_its_own_messages_back_trusts_nobody():
    joiner = Joiner(CODE, PI)
    start = msgspec.msgpack.decode(joiner.start(), type=Start)
    with pytest.raises(ProtocolError, match="invalid element"):
        joiner.receive(msgspec.msgpack.encode(Answer(start.element)))
    inviter, joiner = Inviter(CODE, DESK, 0.0), Joiner(CODE, PI)
    prove = msgspec.msgpack.decode(answered(inviter, joiner), type=Prove)
    with pytest.raises(ClusterError, match="does not know the code itself"):
        joiner.receive(msgspec.msgpack.encode(Accept(prove.who, prove.proof)))


def test_another_version_gets_both_versions_and_costs_no_try():
    inviter = Inviter(CODE, DESK, 0.0)
    start = msgspec.msgpack.decode(Joiner(CODE, PI).start())
    for _ in range(MAX_TRIES + 1):
        reply, _ = inviter.receive("a", msgspec.msgpack.encode(start | {"protocol": 9, "more": 1}), 0.0)
        with pytest.raises(ClusterError, match=r"speaks pairing 1 \(primad 0.1\), this one 1 \(primad 0.2\)"):
            Joiner(CODE, PI).receive(reply)
    assert run(inviter, Joiner(CODE, PI)) == (DESK, PI)


def test_another_cluster_is_named_to_a_joiner_that_knows_the_code():
    inviter = Inviter(CODE, DESK, 0.0)
    with pytest.raises(ClusterError, match="of cluster home, this one of garage; use --cluster home"):
        run(inviter, Joiner(CODE, msgspec.structs.replace(PI, cluster="garage")))
    assert inviter.outcome(0.0) is None


def test_a_device_does_not_pair_with_itself():
    with pytest.raises(ClusterError, match="that is this device"):
        run(Inviter(CODE, DESK, 0.0), Joiner(CODE, DESK))


def test_a_joiner_with_an_invalid_identity_is_refused_though_it_knows_the_code():
    for identity in (
        msgspec.structs.replace(PI, device="\x1b[2J"),
        msgspec.structs.replace(PI, key="short"),
        msgspec.structs.replace(PI, cluster=""),
    ):
        with pytest.raises(ProtocolError, match="is invalid"):
            run(Inviter(CODE, DESK, 0.0), Joiner(CODE, identity))


GARBAGE = {
    "nothing": b"",
    "random bytes": bytes(range(256)),
    "too much": b"\x00" * (MAX_BYTES + 1),
    "a nest": b"\x91" * MAX_BYTES,
    "the other side's": msgspec.msgpack.encode(Answer(bytes(33))),
    "a short proof": msgspec.msgpack.encode(Prove(b"", b"")),
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_refused_and_the_code_stays_good(data: bytes):
    inviter = Inviter(CODE, DESK, 0.0)
    with pytest.raises(ProtocolError):
        inviter.receive("a", data, 0.0)
    assert run(inviter, Joiner(CODE, PI)) == (DESK, PI)
    if len(data) <= MAX_BYTES:
        with pytest.raises(PrimadError):
            Joiner(CODE, PI).receive(data)


ELEMENTS = {
    "none": b"",
    "short": b"A" + bytes(10),
    "the neutral one": b"A\x01" + bytes(31),
    "off the curve": b"A\x02" + bytes(31),
    "of a small group": b"A" + bytes(32),
    "of the same side": b"B" + bytes(32),
    "of no side": bytes(33),
}


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS.keys())
def test_elements_that_are_none_count_as_wrong_codes(element: bytes):
    inviter = Inviter(CODE, DESK, 0.0)
    start = Start(protocol=1, version="0", element=element)
    for number in range(MAX_TRIES):
        reply, identity = inviter.receive("a", msgspec.msgpack.encode(start), number)
        assert identity is None
        assert isinstance(msgspec.msgpack.decode(reply, type=Refuse), Refuse)
    assert inviter.outcome(MAX_TRIES) is CodeOutcome.BURNT


def test_refusals_of_a_liar_are_one_clean_line():
    joiner = Joiner(CODE, PI)
    for why in ("wrong", "burnt", "over", "version", "cluster", "self", "storage"):
        with pytest.raises(ClusterError) as refusal:
            joiner.receive(msgspec.msgpack.encode(Refuse(why=why, detail="\x1b[2J\n", number=1 << 31)))
        assert str(refusal.value).isprintable()
    assert joiner.receive(msgspec.msgpack.encode(Refuse(why="slow", number=1 << 31))) == Later()


def test_every_refusal_of_a_proof_is_final():
    for why in get_args(RefusalReason):
        joiner = Joiner(CODE, PI)
        answered(Inviter(OTHER, DESK, 0.0), joiner)
        with pytest.raises(PrimadError):
            joiner.receive(msgspec.msgpack.encode(Refuse(why=why)))


def test_there_are_256_words_that_nobody_takes_for_each_other():
    assert len(set(WORDS)) == 256
    assert all(3 <= len(word) <= 6 and word.isalpha() and word.islower() for word in WORDS)
    same_but_one = collections.Counter(word[:at] + "?" + word[at + 1 :] for word in WORDS for at in range(len(word)))
    assert max(same_but_one.values()) == 1
    assert not set(WORDS) & {word[:at] + word[at + 1 :] for word in WORDS for at in range(len(word))}


def test_codes_are_drawn_from_all_possible_ones():
    codes = [new_code() for _ in range(3000)]
    assert {code.number for code in codes} == set(range(1, 100))
    assert {code.first for code in codes} | {code.second for code in codes} == set(WORDS)
    assert len({str(code) for code in codes}) > 2990


@pytest.mark.parametrize("text", ["7-lamp-river", "7 lamp river", " 07-Lamp_RIVER\n", "7.lamp, river"])
def test_codes_are_read_as_people_type_them(text: str):
    assert parse_code(text) == CODE
    assert str(CODE) == "7-lamp-river"


@pytest.mark.parametrize(
    ("text", "error"),
    {
        "": "not a code",
        "lamp-river": "not a code",
        "0-lamp-river": "not a code",
        "100-lamp-river": "not a code",
        "7-lamp-river-stone": "not a code",
        "7-lamp-rivre": "is it 'river'",
        "7-lamp-qqqqqq": "check the code",
        "7-lamp-\x1b": "not a code",
    }.items(),
)
def test_an_invalid_code_is_refused_before_a_try_is_spent(text: str, error: str):
    with pytest.raises(ConfigError, match=error) as refusal:
        parse_code(text)
    assert str(refusal.value).isprintable()
