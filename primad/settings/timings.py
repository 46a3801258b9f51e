"""How long things may take and how often they are done, by the room that waits.

A daemon's ``Node`` carries one value of it; each class gets the group of its room. A duration stands here when somebody
besides its only user may choose it, as a test that will not wait for a minute does. One that follows from what a module does
stays beside the code that explains it, and so does one that a single class takes as an argument.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryTimings:
    """mDNS."""

    look_every_s: float = 10.0
    """How often this machine's addresses are looked at."""
    ask_every_s: float = 30.0
    """How often all are asked who is there: multicast gets lost, and a device speaks of itself only when it comes."""
    resolve_timeout_s: float = 6.0
    """A device is asked for its address for so long, again and again."""
    own_name_s: float = 0.5
    """So long it is asked who has the name of this machine."""
    time_to_live_s: int = 120
    """How long others may believe an announcement."""
    look_for_start_s: float = 0.1
    looks_for_start: int = 600
    """zeroconf opens its sockets in the event loop. It is looked so often whether they are open: the loop's turns count and
    not the time, since a machine that is busy or asleep for a while gives it none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkTimings:
    """The control link, and the links that are measured."""

    answer_timeout_s: float = 4.0
    """An answer on the control link, and the way there, where nothing else is said."""
    probe_timeout_s: float = 3.0
    """A device says who it is."""
    hello_timeout_s: float = 5.0
    """A device takes a head or refuses it; it looks at itself first."""
    link_timeout_s: float = 3.0
    """The answers to one lot of echoes, when a link is measured."""
    link_again_s: float = 1.0
    """How long after a first try an unreachable device is measured again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiTimings:
    """The HTTP endpoint, whose clients may be anybody."""

    request_timeout_s: float = 10.0
    """A connection asks something whole, from its beginning and again after each answer."""
    body_timeout_s: float = 60.0
    """A client that takes longer to send its body is refused."""
    send_timeout_s: float = 60.0
    """A client that does not take one event in this time has left: it would hold its sequence for ever."""
    admitted_s: float = 1.0
    """Who is refused hears it at once: a stream of which nothing came after so long begins with its headers."""
    page_every_s: float = 1.0
    """How often pages that are open are told how things stand."""
    keepalive_s: float = 10.0
    """Clients and what lies between give up on a stream that says nothing, as it may while a new ring is formed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimings:
    """Layer files on their way."""

    reach_timeout_s: float = 5.0
    """A device says which layers it has."""
    silence_timeout_s: float = 30.0
    """A device that is silent for so long is left out, and the others are asked for what it owes. One that serves many
    others over a poor link may take as long for a chunk."""
    hub_connect_timeout_s: float = 5.0
    """A device without a way out finds so after so long."""
    hub_silence_timeout_s: float = 30.0
    """A hub of which nothing comes for so long is asked anew."""
    hub_passing_timeout_s: float = 300.0
    """A head that passes on what it reads from the hub, for several devices over one line, may take so long for a chunk."""
    hub_again_s: float = 1.0
    """After so long a hub that failed is asked again, then after twice as long, and so on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingTimings:
    """The ring process."""

    send_timeout_s: float = 10.0
    """A next device that takes no step for so long is not merely slow, since up to the mark steps only go into a buffer."""
    handshake_timeout_s: float = 3.0
    """A device that connects proves who it is."""
    log_every_s: float = 1.0
    """Refused messages and connections are logged so often at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingTimings:
    """The threads that read weights ahead and look after those that stay."""

    look_every_s: float = 0.1
    """While steps pass, some of what stays (a layer, or its experts) is looked at so often."""
    settled_s: float = 1.0
    """So long after a large step the room of its scratch memory is used, where no small step came before: chunks of prompts
    may follow each other."""
    close_timeout_s: float = 5.0
    """A disk that gives one piece after so long hangs, or the machine is of no use anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipTimings:
    """The membership core."""

    settle_s: float = 5.0
    """A ring serves at least this long before a better plan is looked for."""
    greeting_s: float = 1.5
    """How much longer than it looks for devices the first ring waits for those that are being greeted."""
    retry_s: float = 15.0
    """After no plan was found, the same devices are asked again so much later: their memory may have changed."""
    again_s: float = 60.0
    """The first pause until a link that did not work is measured again; the next ones are longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTimings:
    """The head."""

    look_s: float = 2.0
    """How long it looks for devices when nobody said how many to wait for."""
    status_timeout_s: float = 5.0
    """The devices of a ring say what they did and hold."""
    overdue_timeout_s: float = 2.0
    """When a step is overdue, a ring process that does not answer for so long hangs; a slow one answers between steps."""
    trust_look_every_s: float = 2.0
    """How often it looks whether the owner trusted or revoked a device."""
    copy_every_s: float = 1.0
    """Replicas are told of new KV cells no more often."""
    named_again_s: float = 5.0
    """A device of ``--device`` that is not there, or not paired, is asked again after so long."""
    model_again_s: float = 10.0
    """After so long a model file that could not be read is tried again; less than the core waits where there is no plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTimings:
    """The worker."""

    hand_over_timeout_s: float = 60.0
    """How long one that wants to leave waits for others to take over."""
    report_every_s: float = 1.0
    """What strangers and heads cause to be said is said so often at most."""
    release_timeout_s: float = 1.0
    """A stage that is busy with the disk is waited for no longer when it ends: the head is to be heard meanwhile."""
    trust_look_every_s: float = 2.0
    """How often it looks whether the owner still trusts the head that it works for."""
    forgiven_s: float = 600.0
    """A disk that gave all weights for so long is as good as any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Everything that waits. The defaults are what a home runs with."""

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
    """How often a head or a worker that was short of memory looks for room, and only while it waits for some."""
    gpu_look_every_s: float = 20.0
    """The same for a GPU's memory, which takes a process of its own to see."""
