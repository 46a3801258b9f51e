"""A tensor-parallel group in threads of one process, with exchanges in memory."""

import threading

from primad.errors import RingError


class LeftError(RingError):
    """Another rank failed."""


class Meeting:
    """Each rank brings an array to the meeting and sees those of the others."""

    def __init__(self, ranks):
        self._barrier = threading.Barrier(ranks, timeout=60)
        self._brought = [None] * ranks
        self.sums = 0

    def meet(self, rank, values):
        self._brought[rank] = values.copy()
        try:
            self._barrier.wait()
            found = list(self._brought)
            self._barrier.wait()
        except threading.BrokenBarrierError as exc:
            raise LeftError("another rank of this group left") from exc
        return found

    def leave(self):
        self._barrier.abort()


class FakeExchange:
    """The exchange of ``rank``; strict: all parts of a sum have the same shape."""

    def __init__(self, meeting, rank):
        self._meeting, self.rank = meeting, rank

    def sum(self, values):
        found = self._meeting.meet(self.rank, values)
        assert len({each.shape for each in found}) == 1
        total = found[0]
        for each in found[1:]:
            total = total + each
        values[:] = total
        self._meeting.sums += self.rank == 0

    def lead(self, message):
        """Does nothing, as every rank runs each step by itself in these tests."""

    def spread(self, values):
        values[:] = self._meeting.meet(self.rank, values)[0]

    def gather(self, values):
        found = self._meeting.meet(self.rank, values)
        return found if self.rank == 0 else []


def in_group(ranks, run):
    """Run ``run(rank, exchange)`` in one thread per rank and return the results. Raises the first rank's error."""
    meeting, results, errors = Meeting(ranks), [None] * ranks, {}

    def rank(number):
        try:
            results[number] = run(number, FakeExchange(meeting, number))
        except BaseException as exc:  # noqa: BLE001 - raised below
            errors[number] = exc
            meeting.leave()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for exc in sorted(errors.values(), key=lambda each: isinstance(each, LeftError)):
        raise exc
    return results, meeting.sums
