"""Consecutive chunks, compared with a simulation of every chunk at every stop."""

from __future__ import annotations

import random

import pytest

from halda.ring_passes import Hop, Stop, all_chunks


def in_turn(rounds_s: list[list[float]], hops: list[tuple[float, float]], tail: float, chunks: int) -> float:
    """The time when the last chunk leaves the tail: each device and link serves chunks one by one, round by round."""
    free, sent = [0.0] * len(hops), [0.0] * len(hops)
    come = [0.0] * chunks
    for round_s in rounds_s:
        for i, (stop, (takes, occupied)) in enumerate(zip(round_s, hops, strict=True)):
            for c in range(chunks):
                free[i] = max(free[i], come[c]) + stop
                begin = max(free[i], sent[i])
                sent[i] = begin + occupied
                come[c] = begin + takes
    for c in range(chunks):
        free[0] = max(free[0], come[c]) + tail
    return free[0]


def of(rounds_s: list[list[float]], hops: list[tuple[float, float]], tail: float, chunks: int) -> float:
    stops = [[Stop(stop, stop) for stop in round_s] for round_s in rounds_s]
    found: float = all_chunks(stops, [Hop(*hop) for hop in hops], tail, chunks, max)
    return found


def random_hops(rng: random.Random, devices: int) -> list[tuple[float, float]]:
    """For each hop its duration and the part that occupies the link."""
    links = [rng.random() * rng.choice([0.1, 3]) for _ in range(devices)]
    return [(link + rng.random() / 4, link) for link in links]


@pytest.mark.parametrize("seed", range(200))
def test_the_time_of_all_chunks_follows_from_the_first_and_the_last(seed):
    rng = random.Random(seed)
    devices, rounds, chunks = rng.randint(1, 5), rng.randint(1, 5), rng.randint(1, 9)
    rounds_s = [[rng.choice([0.1, 1, 1, 2, 5]) * rng.random() for _ in range(devices)] for _ in range(rounds)]
    hops, tail = random_hops(rng, devices), rng.random() * rng.choice([0.1, 1, 5])
    assert of(rounds_s, hops, tail, chunks) == pytest.approx(in_turn(rounds_s, hops, tail, chunks))


@pytest.mark.parametrize("seed", range(200))
def test_equal_rounds_each_take_as_long_as_their_slowest_part(seed):
    """Equal rounds have a closed form, which programs use that do not know each window's layers."""
    rng = random.Random(seed)
    devices, rounds, chunks = rng.randint(1, 5), rng.randint(1, 5), rng.randint(1, 9)
    round_s, tail = (
        [rng.random() * rng.choice([0.1, 1, 5]) for _ in range(devices)],
        rng.random() * rng.choice([0.1, 1, 5]),
    )
    hops = random_hops(rng, devices)
    once, slowest = sum(round_s) + sum(takes for takes, _ in hops), max(*round_s, *(link for _, link in hops))
    expected = (rounds - 1) * max(once, chunks * slowest) + once + tail + (chunks - 1) * max(slowest, tail)
    head = chunks * (rounds * round_s[0] + tail)
    assert of([round_s] * rounds, hops, tail, chunks) == pytest.approx(max(expected, head))
