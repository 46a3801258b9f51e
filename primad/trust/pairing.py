"""First contact: two devices prove to each other that they got the same short code from their owner (SPAKE2, as in RFC
9382).

Bytes in, bytes out: no socket, no clock. A run has four messages:

    joiner  -> inviter   Start    the joiner's SPAKE2 element
    joiner  <- inviter   Answer   the inviter's: from here on both have a key, the same one only if the codes are the same
    joiner  -> inviter   Prove    who the joiner is, and a MAC of that and of the run so far under the key
    joiner  <- inviter   Accept   who the inviter is, and a MAC of that, of the joiner's words and of the run so far

A stranger without the code learns from a run whether one guess was right, and nothing else. So the inviter allows
``MAX_TRIES`` runs per code, one a second, and counts a run when it replies to the first message, whatever follows. The
joiner proves first: a stranger never learns the inviter's identity, but an impostor of the inviter can test a guess
with each proof. So a joiner gives ``MAX_TRIES`` proofs of a code (``proofs.py`` counts them), and restarts only if it
was put off before its proof. The proof is a MAC and not authenticated encryption, because an HMAC-SHA-256 fits only one
key, while a ciphertext can be made to fit many and so to test many codes together. Each element is random, so a
recorded message fits no later run.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from primad.errors import ClusterError, ProtocolError, printable
from primad.settings.config import NAME
from primad.trust.identity import is_key
from primad.trust.words import Code

if TYPE_CHECKING:
    from spake2 import SPAKE2_A, SPAKE2_B

PROTOCOL: Final = 1
MAX_TRIES: Final = 5
BETWEEN_TRIES_S: Final = 1.0
LIFETIME_S: Final = 600.0
RUN_S: Final = 10.0
"""The timeout of a run from the reply to the proof."""
MAX_BYTES: Final = 4096
_JOINER: Final = b"primad joiner"
_INVITER: Final = b"primad inviter"
_LABEL: Final = b"primad pairing 1"

_Element = Annotated[bytes, msgspec.Meta(min_length=33, max_length=33)]
_Proof = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Version = Annotated[str, msgspec.Meta(max_length=64)]


class Who(msgspec.Struct, frozen=True, kw_only=True):
    """One side's identity: name, public key in Z85, cluster, and the version of its primad."""

    device: str
    key: str
    cluster: str
    version: _Version


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """The joiner starts a run. Later protocols must keep these fields."""

    protocol: int
    version: _Version
    element: bytes


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """The inviter's element."""

    element: _Element


class Prove(msgspec.Struct, frozen=True, tag="prove"):
    """The joiner's identity (``Who`` in msgpack), and the proof."""

    who: Annotated[bytes, msgspec.Meta(max_length=1024)]
    proof: _Proof


class Accept(msgspec.Struct, frozen=True, tag="accept"):
    """The inviter's identity, and the proof."""

    who: Annotated[bytes, msgspec.Meta(max_length=1024)]
    proof: _Proof


RefusalReason = Literal["slow", "wrong", "burnt", "over", "version", "cluster", "self", "storage"]


class Refuse(msgspec.Struct, frozen=True, kw_only=True, tag="refuse"):
    """The inviter ends the run. ``detail`` is a version or a cluster; ``number`` milliseconds, tries or a protocol."""

    why: RefusalReason
    detail: _Version = ""
    number: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0


_to_inviter = msgspec.msgpack.Decoder(Start | Prove)
_to_joiner = msgspec.msgpack.Decoder(Answer | Accept | Refuse)
_who = msgspec.msgpack.Decoder(Who)
encode = msgspec.msgpack.encode


class CodeOutcome(enum.Enum):
    """How the life of a code ended."""

    USED = "used"
    BURNT = "burnt"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Later:
    """The inviter accepts no try now; start a new run after ``BETWEEN_TRIES_S``, whatever time it states."""


@dataclass(frozen=True, slots=True)
class _Run:
    """The shared state after the exchange of elements: both sides have the same ``key`` if their codes are equal."""

    key: bytes
    transcript: bytes

    def proof(self, side: bytes, *words: bytes) -> bytes:
        """Return the MAC by which ``side`` proves that it knows the key and exchanged ``words`` in this run."""
        digests = b"".join(hashlib.sha256(word).digest() for word in words)
        return hmac.digest(self.key, hashlib.sha256(side).digest() + self.transcript + digests, "sha256")


class Inviter:
    """The side that shows ``code``. Times are seconds of any clock that does not jump.

    The code is good for one device; a run that proves it does not count as a try.
    """

    def __init__(self, code: Code, who: Who, now: float, *, lifetime_s: float = LIFETIME_S) -> None:
        self._password = str(code).encode()
        self._who = who
        self._used = False
        self._tries = MAX_TRIES
        self._next_try_at = now
        self._runs: dict[Hashable, tuple[_Run, float]] = {}
        self.ends_at = now + lifetime_s

    def outcome(self, now: float) -> CodeOutcome | None:
        """Return how the code's life ended, or None while a device may still join."""
        if self._used:
            return CodeOutcome.USED
        if now >= self.ends_at:
            return CodeOutcome.EXPIRED
        self._runs = {peer: (run, ends_at) for peer, (run, ends_at) in self._runs.items() if now < ends_at}
        return CodeOutcome.BURNT if self._tries == 0 and not self._runs else None

    def wake_at(self) -> float:
        """Return when ``outcome`` may change without a message."""
        return min([self.ends_at, *(ends_at for _, ends_at in self._runs.values())])

    def receive(self, peer: Hashable, data: bytes, now: float) -> tuple[bytes, Who | None]:
        """Handle a message of ``peer``; return the reply, and the device that has proven the code with it.

        Raises ``ProtocolError`` for an invalid message; it costs ``peer`` its run.
        """
        if len(data) > MAX_BYTES:
            raise ProtocolError(f"pairing message of {len(data)} bytes; at most {MAX_BYTES} are allowed")
        run, run_ends_at = self._runs.pop(peer, (None, 0.0))
        try:
            message = _to_inviter.decode(data)
        except msgspec.MsgspecError as exc:
            raise ProtocolError(f"not a pairing message: {printable(exc)}") from exc
        match message, self.outcome(now):
            case Start(protocol=protocol), _ if protocol != PROTOCOL:
                return encode(Refuse(why="version", detail=self._who.version, number=PROTOCOL)), None
            case Start(), None if self._tries:
                return self._start(peer, message, data, now), None
            case Prove(), None | CodeOutcome.BURNT if run is not None and now < run_ends_at:
                return self._prove(message, run)
            case _, CodeOutcome.USED | CodeOutcome.EXPIRED:
                return encode(Refuse(why="over")), None
            case Start(), _:
                return encode(Refuse(why="burnt")), None
            case _:
                return encode(Refuse(why="over")), None

    def forget(self, peer: Hashable) -> None:
        """Drop the run of ``peer``, which left; its try stays counted."""
        self._runs.pop(peer, None)

    def _start(self, peer: Hashable, message: Start, data: bytes, now: float) -> bytes:
        if now < self._next_try_at:
            return encode(Refuse(why="slow", number=math.ceil(1000 * (self._next_try_at - now))))
        self._tries -= 1
        self._next_try_at = now + BETWEEN_TRIES_S
        from spake2 import SPAKE2_B  # 2 MB that a daemon needs only while pairing

        side = SPAKE2_B(self._password, idA=_JOINER, idB=_INVITER)
        reply = encode(Answer(side.start()))
        key = _finish(side, message.element)
        if key is None:
            return self._wrong()
        self._runs[peer] = _Run(key, _transcript(data, reply)), now + RUN_S
        return reply

    def _prove(self, message: Prove, run: _Run) -> tuple[bytes, Who | None]:
        if not hmac.compare_digest(message.proof, run.proof(_JOINER, message.who)):
            return self._wrong(), None
        self._tries += 1
        who = _decode_who(message.who)
        if who.cluster != self._who.cluster:
            return encode(Refuse(why="cluster", detail=self._who.cluster)), None
        if who.key == self._who.key:
            return encode(Refuse(why="self")), None
        self._used = True
        own = encode(self._who)
        return encode(Accept(own, run.proof(_INVITER, message.who, own))), who

    def _wrong(self) -> bytes:
        return encode(Refuse(why="wrong", number=self._tries) if self._tries else Refuse(why="burnt"))


class Joiner:
    """The side that received ``code``; for one run."""

    def __init__(self, code: Code, who: Who) -> None:
        from spake2 import SPAKE2_A

        self._side = SPAKE2_A(str(code).encode(), idA=_JOINER, idB=_INVITER)
        self._who = who
        self._start = encode(Start(protocol=PROTOCOL, version=who.version, element=self._side.start()))
        self._run: _Run | None = None

    def start(self) -> bytes:
        """Return the first message."""
        return self._start

    def receive(self, data: bytes) -> bytes | Who | Later:
        """Handle the inviter's next message; return the reply, or at the end the inviter's identity.

        Raises ``ClusterError`` if the inviter refuses, or does not know the code itself.
        """
        try:
            message = _to_joiner.decode(data)
        except msgspec.MsgspecError as exc:
            raise ProtocolError(f"that port does not serve pairing: {printable(exc)}") from exc
        match message:
            case Refuse(why="slow") if self._run is None:
                return Later()
            case Refuse(why=why) if why != "slow":
                raise ClusterError(_reason(message, self._who))
            case Answer() if self._run is None:
                return self._answer(message, data)
            case Accept() if self._run is not None:
                return self._accept(message, self._run)
            case _:
                raise ProtocolError("that device breaks the order of pairing")

    def _answer(self, message: Answer, data: bytes) -> bytes:
        key = _finish(self._side, message.element)
        if key is None:
            raise ProtocolError("that device sent an invalid element of the curve")
        self._run = _Run(key, _transcript(self._start, data))
        own = encode(self._who)
        return encode(Prove(own, self._run.proof(_JOINER, own)))

    def _accept(self, message: Accept, run: _Run) -> Who:
        if not hmac.compare_digest(message.proof, run.proof(_INVITER, encode(self._who), message.who)):
            raise ClusterError("that device does not know the code itself, so it is not trusted")
        return _decode_who(message.who)


def refuse_storage() -> bytes:
    """Return the inviter's last message if it could not store the key of the proven device."""
    return encode(Refuse(why="storage"))


def _finish(side: SPAKE2_A | SPAKE2_B, element: bytes) -> bytes | None:
    """Return the key, or None for an invalid element."""
    from spake2 import SPAKEError
    from spake2.ed25519_basic import NotOnCurve

    if len(element) != 33:
        return None
    try:
        return bytes(side.finish(element))
    except (SPAKEError, NotOnCurve, ValueError):
        return None


def _transcript(start: bytes, answer: bytes) -> bytes:
    return hashlib.sha256(_LABEL + hashlib.sha256(start).digest() + hashlib.sha256(answer).digest()).digest()


def _decode_who(data: bytes) -> Who:
    try:
        who = _who.decode(data)
    except msgspec.MsgspecError as exc:
        raise ProtocolError(f"pairing with a device without an identity: {printable(exc)}") from exc
    if not NAME.fullmatch(who.device) or not NAME.fullmatch(who.cluster) or not is_key(who.key):
        raise ProtocolError(f"pairing with {printable(who.device, 70)!r}: its name, cluster or key is invalid")
    return who


def _reason(message: Refuse, own: Who) -> str:
    again = "ask for a new one there with 'primad pair'"
    match message.why:
        case "wrong":
            return f"wrong code ({message.number} tries are left); check it"
        case "burnt":
            return f"too many wrong codes were tried, so the code is invalid; {again}"
        case "version":
            theirs = f"{message.number} (primad {printable(message.detail, 64)})"
            return (
                f"that device speaks pairing {theirs}, this one {PROTOCOL} (primad {own.version}); update the older one"
            )
        case "cluster":
            theirs = printable(message.detail, 64)
            return f"that device is of cluster {theirs}, this one of {own.cluster}; use --cluster {theirs}"
        case "self":
            return "that is this device, or one with a copy of its identity; give each its own --home"
        case "storage":
            return "that device cannot store the key of this one; its log says why"
        case _:
            return f"the code was used or has expired; {again}"
