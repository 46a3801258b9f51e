"""``seed.py SPEED``: make the lab device on which it runs count as measured, ``SPEED`` times as fast as others."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.fakes.profile import seed

if __name__ == "__main__":
    home = Path(os.environ["PRIMAD_HOME"])
    home.mkdir(parents=True, exist_ok=True)
    seed(home, float(sys.argv[1]))
