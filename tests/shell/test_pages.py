"""Pages of files mapped in this process: found, read, released, counted, and reported when a file has changed."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from primad.engine.streaming import pages as pages_module
from primad.engine.streaming.pages import PIECE_BYTES, FileRange, Pages
from primad.errors import EngineError

PAGE = mmap.PAGESIZE
PART = 1 << 20
FILE_PARTS = 16
SLACK = 256 << 10
"""The system reads around a request, and releases pages that it holds together only together."""
on_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux says where a file is mapped, and what is in memory"
)

Map = Callable[..., Path]


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[Map]:
    """Makes files of ``FILE_PARTS`` parts, mapped as llama.cpp maps them, on disk and not in memory."""
    mappings = []

    def make(name: str = "weights", *, mapped: bool = True, size: int = FILE_PARTS * PART) -> Path:
        path = tmp_path / name
        with path.open("wb") as file:
            file.write(os.urandom(size))
            file.flush()
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if mapped:
            with path.open("rb") as file:
                mappings.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return path

    yield make
    for mapping in mappings:
        mapping.close()


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that does not report where a file is mapped."""
    monkeypatch.setattr(pages_module, "_LIBC", None)


@pytest.fixture
def made() -> Iterator[Callable[..., Pages]]:
    """Makes units and closes them at the end."""
    units: list[Pages] = []

    def make(*ranges: FileRange) -> Pages:
        units.append(Pages(ranges))
        return units[-1]

    yield make
    for unit in units:
        unit.close()


@pytest.fixture
def opened(made: Callable[..., Pages]) -> Callable[..., Pages]:
    """Makes units that are already located in this process."""

    def make(*ranges: FileRange) -> Pages:
        unit = made(*ranges)
        unit.find()
        return unit

    return make


def in_parts(path: Path, first: int, count: int) -> FileRange:
    return FileRange(str(path), first * PART, count * PART)


def is_evicted(unit: Pages) -> bool:
    return unit.size - SLACK <= unit.missing() <= unit.size


@pytest.fixture
def on_disk(weights: Map, opened: Callable[..., Pages]) -> None:
    """Skip the test if files in its folder cannot leave memory."""
    if not is_evicted(opened(in_parts(weights("probe"), 0, FILE_PARTS))):
        pytest.skip("the file system of the test's folder keeps its files in memory (tmpfs)")


@on_linux
@pytest.mark.usefixtures("on_disk")
def test_a_unit_is_in_memory_after_reading_and_not_after_release(weights, opened):
    unit = opened(in_parts(weights(), 2, 8))
    assert is_evicted(unit)
    assert unit.read() == 8 * PART
    assert unit.missing() == 0
    assert unit.has_last_page()
    assert unit.read() == 0, "it was there"
    unit.release()
    assert is_evicted(unit)


@on_linux
@pytest.mark.usefixtures("on_disk")
def test_a_release_leaves_adjacent_units_in_memory(weights, opened):
    path = weights()
    unit, before, behind = (opened(in_parts(path, *place)) for place in ((2, 8), (0, 2), (10, 6)))
    for each in (before, unit, behind):
        each.read()
    unit.release()
    assert (before.missing(), behind.missing()) == (0, 0)
    assert is_evicted(unit)
    before.release()
    assert is_evicted(before)
    assert behind.missing() == 0


@on_linux
@pytest.mark.usefixtures("on_disk")
def test_a_page_that_two_ranges_share_belongs_to_both(weights, opened):
    """Reading either range reads it; releasing one does not release it."""
    path, half = str(weights()), PAGE // 2
    first = opened(FileRange(path, 0, 4 * PART + half))
    second = opened(FileRange(path, 4 * PART + half, 4 * PART))
    shared = opened(FileRange(path, 4 * PART, PAGE))
    assert shared.missing() == PAGE
    first.read()
    assert shared.missing() == 0
    first.release()
    assert is_evicted(first)
    assert shared.missing() == 0
    second.read()
    second.release()
    assert is_evicted(second)
    assert shared.missing() == 0


@on_linux
@pytest.mark.usefixtures("on_disk")
def test_ranges_of_several_files_are_one_unit(weights, opened):
    paths = [weights("a"), weights("b")]
    unit = opened(*(in_parts(path, 4, 4) for path in paths))
    assert unit.size == 8 * PART
    assert is_evicted(unit)
    assert unit.read() == unit.size
    assert unit.missing() == 0
    assert [piece.span.file.path for piece in unit.pieces()] == [str(path) for path in paths]


@on_linux
@pytest.mark.usefixtures("on_disk")
def test_a_link_to_the_file_is_the_file(weights, tmp_path, opened):
    link = tmp_path / "link"
    link.symlink_to(weights())
    assert opened(in_parts(link, 0, 4)).read() == 4 * PART


def test_a_large_range_is_read_in_pieces(weights, opened):
    unit = opened(FileRange(str(weights(size=2 * PIECE_BYTES + 3 * PAGE)), PAGE, 2 * PIECE_BYTES + PAGE))
    sizes = [(piece.start, piece.size) for piece in unit.pieces()]
    assert sizes == [(0, PIECE_BYTES), (PIECE_BYTES, PIECE_BYTES), (2 * PIECE_BYTES, PAGE)]


@on_linux
def test_weights_that_are_not_mapped_cannot_be_streamed(weights, made):
    path = weights(mapped=False)
    unit = made(in_parts(path, 0, 4))
    assert not unit.mapped()
    with pytest.raises(EngineError, match=r"llama\.cpp did not map its weights") as caught:
        unit.find()
    assert str(path) in str(caught.value)


@on_linux
def test_a_range_beyond_the_mapping_is_not_mapped(weights, made):
    assert not made(in_parts(weights(), FILE_PARTS - 1, 2)).mapped()


def test_a_missing_file_is_named(tmp_path, made):
    path = tmp_path / "nowhere"
    with pytest.raises(EngineError, match="cannot be opened: No such file") as caught:
        made(FileRange(str(path), 0, 1))
    assert str(path) in str(caught.value)


def test_a_modified_file_is_reported_until_it_is_trusted(weights, opened):
    path, other = weights("a"), weights("b")
    unit = opened(in_parts(path, 0, 4), in_parts(other, 0, 4))
    assert unit.changed() == []
    with path.open("r+b") as file:
        file.write(b"x")
    os.utime(path, ns=(1, 1))  # even if the file system's clock is coarse
    assert unit.changed() == [str(path)]
    unit.trust(str(path))
    assert unit.changed() == []


def test_a_file_that_became_shorter_changed(weights, opened):
    path = weights()
    unit = opened(in_parts(path, 0, 4))
    os.truncate(path, 8 * PART)
    assert unit.changed() == [str(path)]


def test_another_file_of_the_same_name_leaves_the_one_in_use_as_it_is(weights, opened):
    """The old file stays mapped; the new one does not concern this process."""
    path, other = weights("a"), weights("b", mapped=False)
    unit = opened(in_parts(path, 0, 4))
    other.replace(path)
    assert unit.changed() == []
    unit.read()


@on_linux
def test_a_truncated_file_is_one_clear_error(weights, opened):
    path = weights()
    unit = opened(in_parts(path, 8, 4))
    os.truncate(path, 4 * PART)
    with pytest.raises(EngineError, match="weights cannot be read: it was cut short while it was used") as caught:
        unit.read()
    assert str(path) in str(caught.value)


@on_linux
@pytest.mark.usefixtures("on_disk")
def test_locked_pages_stay(weights, opened):
    unit = opened(in_parts(weights(), 0, 4))
    unit.read()
    unit.lock()
    unit.release()
    assert unit.missing() == 0
    unit.unlock()
    unit.release()
    assert is_evicted(unit)


@on_linux
@pytest.mark.usefixtures("on_disk")
def test_a_row_read_at_random_loads_only_its_page(weights, opened):
    path = weights(mapped=False)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as rows:
        unit = opened(in_parts(path, 0, FILE_PARTS))
        unit.at_random()
        assert rows[5 * PART] is not None
        assert unit.missing() == unit.size - PAGE


@on_linux
@pytest.mark.usefixtures("on_disk")
def test_an_older_kernel_reads_by_touching(weights, monkeypatch, opened):
    """MADV_POPULATE_READ came with Linux 5.14."""
    monkeypatch.setattr(pages_module, "POPULATE_READ", 222)
    unit = opened(in_parts(weights(), 8, 4))
    assert unit.read() == 4 * PART
    assert unit.missing() == 0


@pytest.mark.usefixtures("portable")
def test_elsewhere_a_mapping_of_our_own_serves(weights, opened):
    """The file need not be mapped; what is read is counted, what is missing is unknown."""
    path = weights(mapped=False)
    unit = opened(FileRange(str(path), 5 * PART + 100, 7 * PART))
    assert unit.mapped()
    assert unit.read() == 7 * PART
    assert unit.missing() == 0
    assert not unit.has_last_page()
    unit.release()
    unit.at_random()
    unit.lock()
    unit.unlock()
    assert unit.read() == 7 * PART
    unit.close()


@on_linux
@pytest.mark.usefixtures("on_disk")
def test_a_range_read_by_another_unit_is_in_memory_for_every_mapping(weights, monkeypatch, opened):
    path = weights()
    watcher = opened(in_parts(path, 8, 4))
    assert is_evicted(watcher)
    with monkeypatch.context() as patch:
        patch.setattr(pages_module, "_LIBC", None)
        assert opened(in_parts(path, 8, 4)).read() == 4 * PART
    assert watcher.missing() == 0


def test_a_closed_unit_lets_the_file_go(weights, opened):
    path = weights()
    unit = opened(in_parts(path, 0, 4))
    handle = unit._files[str(path)].handle
    unit.close()
    assert handle.closed
    assert list(unit.pieces()) == []


@on_linux
def test_a_part_is_read_and_released_and_the_rest_stays(weights, opened):
    unit = opened(in_parts(weights(), 0, FILE_PARTS))
    unit.in_groups()
    unit.read()
    part = unit.part(4 * PART, 8 * PART)
    part.release()
    assert part.missing() == part.size
    assert unit.missing() == part.size, "what is before and after it stays"
    assert part.read() == part.size
    assert unit.missing() == 0


@on_linux
def test_units_are_parted_where_no_group_of_pages_is_shared(weights, made):
    path = weights()
    unit = made(FileRange(str(path), PART, 9 * PART), FileRange(str(path), 11 * PART, 5 * PART))
    cuts = unit.cuts()
    assert cuts == tuple(PART * each for each in (1, 3, 5, 7, 9, 10, 12, 14))
    assert all(cut <= unit.size for cut in cuts)


@on_linux
def test_a_part_of_several_ranges_is_where_they_are(weights, opened):
    path = weights()
    unit = opened(FileRange(str(path), 0, 4 * PART), FileRange(str(path), 8 * PART, 4 * PART))
    unit.release()
    part = unit.part(2 * PART, 6 * PART)
    part.read()
    assert part.missing() == 0
    assert unit.part(0, 2 * PART).missing() + unit.part(6 * PART, 8 * PART).missing() >= 4 * PART - SLACK


@on_linux
def test_an_explicit_read_is_no_page_fault(weights, opened):
    resource = pytest.importorskip("resource")
    unit = opened(in_parts(weights(), 0, FILE_PARTS))
    unit.release()
    before, all_before = pages_module.major_faults(), resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    unit.read()
    counted = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - all_before
    # The system counts no fault for pages that the disk delivered along with others.
    assert pages_module.major_faults() - before <= max(1, counted // 4), "few others, of code that was not in memory"
