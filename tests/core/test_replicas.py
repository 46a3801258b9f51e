"""Which device replicates whose KV cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halda import LayerProfile, Plan, Window
from primad.planning.replicas import LINK_SHARE, Holder, cell_bytes, replicas, state_tokens, token_bytes

FAST = 1e9


def device(name: str, *, host: str | None = None, room: int = 10, token: int = 1000) -> Holder:
    return Holder(device=name, host=host or f"host of {name}", room_bytes=room, token_bytes=token)


def links(*names: str, rate: float = FAST) -> dict[tuple[str, str], float]:
    return {(source, target): rate for source in names for target in names if source != target}


def chosen(devices: list[Holder], rates: dict[tuple[str, str], float], **options: object) -> dict[str, str | None]:
    return {kept.device: kept.replica for kept in replicas(devices, "desk", rates, 10.0, **options)}


def test_the_device_with_the_most_room_is_the_replica():
    devices = [device("desk", room=1), device("lap", room=5), device("nas", room=9)]
    assert chosen(devices, links("desk", "lap", "nas")) == {"lap": "nas", "nas": "lap"}


def test_another_machine_goes_before_more_room():
    devices = [device("desk", room=1), device("a", host="one", room=5), device("b", host="one", room=9)]
    assert chosen(devices, links("desk", "a", "b")) == {"a": "desk", "b": "desk"}


def test_a_machine_keeps_what_it_has_when_there_is_no_other():
    devices = [device(name, host="one") for name in ("desk", "lap")]
    assert chosen(devices, links("desk", "lap")) == {"lap": "desk"}


def test_nobody_keeps_all_where_others_have_the_same_room():
    devices = [device(name) for name in ("desk", "a", "b", "c")]
    kept = chosen(devices, links("desk", "a", "b", "c"))
    assert len(set(kept.values())) == 3


@pytest.mark.parametrize(("rate", "replica"), [(10 * 1000 / LINK_SHARE, "desk"), (10 * 1000 / LINK_SHARE - 1, None)])
def test_a_slow_link_carries_no_copies_and_the_reason_is_given(rate, replica):
    (kept,) = replicas([device("desk"), device("lap")], "desk", links("desk", "lap", rate=rate), 10.0)
    assert kept.replica == replica
    assert kept.bytes_per_s == (0 if replica is None else 10_000)
    assert ("link" in kept.why) == (replica is None)


def test_copies_that_were_asked_for_are_made_however_slow_a_link_is():
    assert chosen([device("desk"), device("lap")], {}, always=True) == {"lap": "desk"}


def test_a_single_device_has_no_replica():
    assert replicas([device("desk")], "desk", {}, 10.0) == []


def test_the_bytes_of_a_token_follow_from_the_layers_of_a_device():
    layers = [
        LayerProfile(bytes_by_type={}, expert_bytes_by_type={}, kv_bytes_per_token=size) for size in (100, 200, 400)
    ]
    route = tuple(
        Window(device=name, first=at, last=at + 1, gpu_layers=0) for at, name in enumerate(("desk", "lap", "desk"))
    )
    plan = Plan(rounds=1, route=route, output_on_gpu=False, streaming=(), left_out=())
    assert cell_bytes(plan, layers, "f16") == {"desk": 500, "lap": 200}
    assert cell_bytes(plan, layers, "q8_0")["lap"] < 200


@pytest.mark.parametrize(("rate", "rows"), [(47e6, 128), (46e6, 512), (12e6, 512), (11e6, 2048), (2e6, 128)])
def test_a_state_is_kept_as_often_as_links_carry_it(rate, rows):
    """100 MB per 128 tokens, at 12 tokens a second, are 9.4 MB/s."""
    layer = LayerProfile(bytes_by_type={}, expert_bytes_by_type={}, kv_bytes_per_token=1000, state_bytes=100_000_000)
    route = tuple(
        Window(device=name, first=at, last=at + 1, gpu_layers=0) for at, name in enumerate(("desk", "lap", "desk"))
    )
    plan = Plan(rounds=1, route=route, output_on_gpu=False, streaming=(), left_out=())
    asked = (plan, [layer] * 3, "f16", {("lap", "desk"): rate}, 12.0)
    assert state_tokens(*asked) == rows
    assert token_bytes(*asked)["lap"] == 1000 + 100_000_000 // rows


@pytest.mark.parametrize(
    ("state_bytes", "rate", "tokens_per_s", "rows"),
    [
        (10_000_000, 1e8, 12, 32),
        (10_000_000, 1e8, 14, 64),  # limited by disks
        (10_000_000, 3e6, 12, 512),  # limited by links
        (10_000_000, 1e8, 26, 128),
        (1000, 1e8, 96, 32),
        (1000, 1e8, 97, 64),  # three states are kept, and the replica has none of them yet
        (1000, 1e8, 200, 128),
    ],
)
def test_a_state_is_kept_more_often_where_it_is_small(state_bytes, rate, tokens_per_s, rows):
    layer = LayerProfile(bytes_by_type={}, expert_bytes_by_type={}, kv_bytes_per_token=1000, state_bytes=state_bytes)
    route = tuple(
        Window(device=name, first=at, last=at + 1, gpu_layers=0) for at, name in enumerate(("desk", "lap", "desk"))
    )
    plan = Plan(rounds=1, route=route, output_on_gpu=False, streaming=(), left_out=())
    assert state_tokens(plan, [layer] * 3, "f16", {("lap", "desk"): rate}, tokens_per_s) == rows


@given(
    st.lists(
        st.tuples(st.sampled_from(["x", "y"]), st.integers(0, 100), st.integers(0, 10_000)), min_size=1, max_size=7
    ),
    st.floats(0, 1e6),
)
def test_every_worker_has_another_replica_or_a_reason(found, rate):
    devices = [device(f"d{i}", host=host, room=room, token=token) for i, (host, room, token) in enumerate(found)]
    names = [each.device for each in devices]
    reported = replicas(devices, "d0", links(*names, rate=rate), 10.0)
    assert [kept.device for kept in reported] == sorted(names[1:])
    for kept in reported:
        assert kept.replica != kept.device
        assert (kept.replica is None) == bool(kept.why)
        assert kept.replica is None or kept.bytes_per_s <= LINK_SHARE * rate
