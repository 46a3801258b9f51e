"""Pairing codes, such as 7-lamp-river, and the 256 short common words that they are made of.

Any two words differ in at least two letters and hardly any two sound alike, so that a code can be called across a room.
The order of the words does not matter, since a code is compared as text. Both devices must know a word, so the list
only grows.
"""

from __future__ import annotations

import difflib
import re
import secrets
from dataclasses import dataclass
from typing import Final

from primad.errors import ConfigError, printable

_TEXT: Final = """
    acorn album almond amber anchor ankle apple arrow atlas attic autumn avenue bacon bakery bamboo banana banjo
    basket beaver bench berry bishop bottle breeze bridge bronze broom brush bucket butter cactus camera candle
    canvas carpet castle celery chalk cherry chess cinema circus citrus clay cloud clover cobalt coffee comet copper
    coral corner cotton couch crayon crown cube daisy dance delta denim desert diary dinner doctor domino donkey
    dragon drawer drum eagle easel echo elbow eleven engine fabric falcon family farmer fern fiddle field finger
    flute forest fossil fox fruit galaxy garage garden garlic glass globe gold gravel guitar hammer harbor helmet
    herb honey hotel hunter ice igloo impala indigo insect iris island ivory jacket jaguar jelly jigsaw jockey
    jungle kayak kennel kettle kitten koala ladder lagoon lamp laptop lemon letter lilac lion lizard lotus lunch
    magnet mango maple marble market meadow mimosa mirror moon motor mouse muffin museum music napkin nature nickel
    north nutmeg oasis oboe ocean olive onion opera orange orbit orchid owl oxygen oyster paddle palace panda parrot
    pasta pebble pencil pepper piano picnic pigeon pilot pirate planet pocket polar potato prism puppet puzzle
    quartz quiz rabbit radar raisin ranch ribbon river robin roof rubber ruby safari sailor salad salmon saturn
    school scout shadow shrimp silver sketch sloth snow spider spoon spruce squash stamp statue stone summer swan
    syrup table teapot temple tennis tiger toast tomato torch tower trail tulip tunnel turtle twelve uncle vacuum
    valley velvet vessel violin visor waffle wagon walnut water wheel window winter wolf yacht yellow yogurt zebra
    zigzag zipper
"""
WORDS: Final = tuple(_TEXT.split())
_NUMBERS: Final = 99


@dataclass(frozen=True, slots=True)
class Code:
    """A number from 1 to 99 and two of 256 words.

    The number is announced, to find the device that shows the code. The words are secret: 65,536 pairs, of which a
    stranger may try five.
    """

    number: int
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.number}-{self.first}-{self.second}"


def new_code() -> Code:
    """Return a random code."""
    return Code(1 + secrets.randbelow(_NUMBERS), secrets.choice(WORDS), secrets.choice(WORDS))


def parse_code(text: str) -> Code:
    """Parse a code as a person typed it: case and separators do not matter. Raises ``ConfigError``."""
    parts = re.findall(r"[^\W_]+", text.lower())
    if len(parts) != 3 or not re.fullmatch(r"[0-9]{1,2}", parts[0]) or int(parts[0]) == 0:
        raise ConfigError(
            f"--code: {printable(text, 40)!r} is not a code; a code is a number and two words, such as 7-lamp-river"
        )
    for word in parts[1:]:
        if word not in WORDS:
            close = difflib.get_close_matches(word, WORDS, n=1)
            hint = f"; is it '{close[0]}'?" if close else "; check the code"
            raise ConfigError(f"--code: no code has the word {printable(word, 20)!r}{hint}")
    return Code(int(parts[0]), parts[1], parts[2])
