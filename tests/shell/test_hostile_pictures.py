"""Hostile files for the picture process: each is decoded or refused; none ends the process or stays in its memory."""

from __future__ import annotations

import asyncio
from itertools import islice
from random import Random

import pytest

from tools.lab.fuzzed_pictures import fuzz, tiny_service
from tools.lab.hostile_media import GOOD, GOOD_SOUNDS, bomb, cases, long_sound


@pytest.mark.parametrize(("good", "bomb"), [(GOOD, bomb), (GOOD_SOUNDS, long_sound)], ids=["pictures", "sounds"])
async def test_no_file_ends_the_process_for_pictures(good, bomb, tmp_path):
    """A few hundred files; ``tools/fuzz_pictures.py`` runs as long as it is asked to."""
    service = tiny_service(tmp_path, hears=good is GOOD_SOUNDS)
    async with asyncio.timeout(200):
        found = await fuzz(service, [*islice(cases(49, good, bombs=False), 250), ("bomb", bomb(Random(3)))])
        await service.close()
    assert found.findings == []
    assert service.starts == 1
    assert found.accepted.total() > 50
    assert found.refused.total() > 50


@pytest.mark.parametrize("make", [*GOOD, *GOOD_SOUNDS])
async def test_every_kind_of_a_supported_format_is_decoded(make, tmp_path):
    service = tiny_service(tmp_path, hears=make in GOOD_SOUNDS)
    async with asyncio.timeout(100):
        found = await fuzz(service, [("good", make(Random(number))) for number in range(12)])
        await service.close()
    assert found.accepted.total() == 12, found.refused
