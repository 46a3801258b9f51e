"""A program beside primad that takes up to so many bytes of memory at random, holds them a moment and frees them.

    neighbour.py MOST SEED

Goes on until it is given a line or its input is closed; then prints how often it took some.
"""

from __future__ import annotations

import random
import select
import sys


def main() -> None:
    most, chance = int(sys.argv[1]), random.Random(int(sys.argv[2]))
    say("ready")
    taken = 0
    while not closed(chance.uniform(0.01, 0.2)):
        held = b"\1" * chance.randrange(most // 4, most)  # written to, so that it is there
        taken += 1
        if closed(chance.uniform(0.05, 0.5)):
            break
        del held
    say(str(taken))


def say(line: str) -> None:
    """To whoever started it."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def closed(wait_s: float) -> bool:
    """Whether there is a line or an end of input, awaited for so long."""
    return bool(select.select([sys.stdin], [], [], wait_s)[0])


if __name__ == "__main__":
    main()
