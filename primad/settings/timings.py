"""Timeouts and intervals, grouped by the room that waits.

A daemon's ``Node`` carries one value of it; each class gets the group of its room. A duration is here when something
besides its only user may choose it, such as a test that will not wait for a minute. A duration that follows from what a
module does stays next to the code that explains it, and so does one that a single class takes as an argument.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryTimings:
    """mDNS."""

    look_every_s: float = 10.0
    """Interval between checks of this machine's addresses."""
    ask_every_s: float = 30.0
    """Interval between queries for other devices: multicast gets lost, and a device announces itself only when it
    appears."""
    resolve_timeout_s: float = 6.0
    """How long a device is repeatedly asked for its address."""
    own_name_s: float = 0.5
    """How long to ask whether this machine's name is taken."""
    time_to_live_s: int = 120
    """How long others may believe an announcement."""
    look_for_start_s: float = 0.1
    looks_for_start: int = 600
    """Number and interval of checks whether zeroconf, which opens its sockets in the event loop, has opened them. The
    loop's turns are counted, not the time: a machine that is busy or asleep for a while gives the loop no turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkTimings:
    """The control link, and the measurement of links."""

    answer_timeout_s: float = 4.0
    """Default timeout of a response on the control link, and of connecting."""
    probe_timeout_s: float = 3.0
    """Timeout for a device to identify itself."""
    hello_timeout_s: float = 5.0
    """Timeout for a device to accept or refuse a head; it checks its own state first."""
    link_timeout_s: float = 3.0
    """Timeout for the replies to one batch of echoes, when a link is measured."""
    link_again_s: float = 1.0
    """Delay before an unreachable device is measured again after a first try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiTimings:
    """The HTTP endpoint, whose clients are not trusted."""

    request_timeout_s: float = 10.0
    """Timeout to receive the head of a request, from the start of a connection and again after each response."""
    body_timeout_s: float = 60.0
    """A client that takes longer to send its body is refused."""
    send_timeout_s: float = 60.0
    """A client that does not take one event in this time is considered gone: it would hold its sequence forever."""
    admitted_s: float = 1.0
    """A stream without any output after this time sends its headers; until then a refusal can still have its own
    status."""
    page_every_s: float = 1.0
    """Interval between status updates of open pages."""
    keepalive_s: float = 10.0
    """Interval of keep-alives: clients and proxies give up on a silent stream, which is silent while a new ring forms.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimings:
    """Transfers of layer files."""

    reach_timeout_s: float = 5.0
    """Timeout for a device to report which layers it has."""
    silence_timeout_s: float = 30.0
    """A device that is silent for this long is left out, and the others are asked for its layers. A device that serves
    many others over a slow link may take this long for a chunk."""
    hub_connect_timeout_s: float = 5.0
    """Timeout after which a device considers itself without internet access."""
    hub_silence_timeout_s: float = 30.0
    """A hub that sends nothing for this long is asked again."""
    hub_passing_timeout_s: float = 300.0
    """Timeout for a chunk from a head that relays what it reads from the hub, for several devices over one connection.
    """
    hub_again_s: float = 1.0
    """Delay before a failed hub is asked again; doubled after each failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingTimings:
    """The ring process."""

    send_timeout_s: float = 10.0
    """A next device that takes no step for this long is not merely slow, since up to the high-water mark steps only go
    into a buffer."""
    handshake_timeout_s: float = 3.0
    """Timeout for a connecting device to prove its identity."""
    log_every_s: float = 1.0
    """Minimum interval between log lines about refused messages and connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingTimings:
    """The threads that read weights ahead and check those that stay in memory."""

    look_every_s: float = 0.1
    """Interval at which part of the resident weights (a layer, or its experts) is checked while steps run."""
    settled_s: float = 1.0
    """Delay after a large step before its scratch memory is reused, unless a small step comes first: chunks of prompts may
    follow each other."""
    close_timeout_s: float = 5.0
    """A disk that needs longer for one piece hangs, or the machine is of no use anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipTimings:
    """The membership core."""

    settle_s: float = 5.0
    """A ring serves at least this long before a better plan is searched for."""
    greeting_s: float = 1.5
    """Time beyond the search for devices that the first ring waits for devices that are still connecting."""
    retry_s: float = 15.0
    """Delay before the same devices are asked again when there was no plan: their memory may have changed."""
    again_s: float = 60.0
    """First pause before a link that did not work is measured again; later pauses are longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTimings:
    """The head."""

    look_s: float = 2.0
    """How long to look for devices when the number to wait for was not given."""
    status_timeout_s: float = 5.0
    """Timeout for the devices of a ring to report their status."""
    overdue_timeout_s: float = 2.0
    """When a step is overdue, a ring process that does not respond for this long hangs; a slow one responds between
    steps."""
    trust_look_every_s: float = 2.0
    """Interval of checks whether the owner trusted or revoked a device."""
    copy_every_s: float = 1.0
    """Minimum interval between notifications of replicas about new KV cells."""
    named_again_s: float = 5.0
    """Delay before a device of ``--device`` that is unreachable or not paired is asked again."""
    model_again_s: float = 10.0
    """Delay before an unreadable model file is tried again; shorter than the core's wait without a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTimings:
    """The worker."""

    hand_over_timeout_s: float = 60.0
    """How long a worker that wants to leave waits for others to take over."""
    report_every_s: float = 1.0
    """Minimum interval between reports caused by strangers and heads."""
    release_timeout_s: float = 1.0
    """Longest wait for an ending stage that is busy with the disk: the head must be heard meanwhile."""
    trust_look_every_s: float = 2.0
    """Interval of checks whether the owner still trusts the head that this worker works for."""
    forgiven_s: float = 600.0
    """A disk that delivered all weights for this long counts as healthy again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """All timings. The defaults are what a home runs with."""

    discovery: DiscoveryTimings = DiscoveryTimings()
    network: NetworkTimings = NetworkTimings()
    layers: LayerTimings = LayerTimings()
    ring: RingTimings = RingTimings()
    streaming: StreamingTimings = StreamingTimings()
    membership: MembershipTimings = MembershipTimings()
    api: ApiTimings = ApiTimings()
    head: HeadTimings = HeadTimings()
    worker: WorkerTimings = WorkerTimings()
    memory_look_every_s: float = 2.0
    """Interval at which a head or a worker that was short of memory checks for free memory, only while it waits for
    some."""
    gpu_look_every_s: float = 20.0
    """The same for a GPU's memory, which takes a separate process to read."""
