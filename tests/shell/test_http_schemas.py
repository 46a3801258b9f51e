"""Runs ``http_schemas.py``, which makes its examples at collection, once and not in each process of a suite."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_every_response_matches_the_openapi_schemas():
    tests = Path(__file__).with_name("http_schemas.py")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "schemathesis", str(tests)]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout
