"""The number of proofs of a pairing code that a device gives."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from primad.errors import ClusterError, ConfigError
from primad.trust import proofs as proofs_module
from primad.trust.identity import new_identity
from primad.trust.pairing import MAX_TRIES
from primad.trust.proofs import FILE_NAME, Proofs
from primad.trust.words import Code

CODE = Code(7, "lamp", "river")
IDENTITY = new_identity()


def test_a_code_is_proven_five_times_at_most_across_restarts(tmp_path: Path):
    for _ in range(MAX_TRIES):
        proofs = Proofs(tmp_path, IDENTITY, CODE)
        proofs.check()
        proofs.count()
    for refused in (proofs.check, proofs.count, Proofs(tmp_path, IDENTITY, CODE).check):
        with pytest.raises(ClusterError, match=r"--code 7-...: was tried 5 times .* get a new one"):
            refused()
    Proofs(tmp_path, IDENTITY, Code(7, "lamp", "stone")).count()


def test_the_file_is_private_bounded_and_does_not_contain_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(proofs_module, "MAX_CODES", 3)
    for number in range(1, 6):
        Proofs(tmp_path, IDENTITY, Code(number, "lamp", "river")).count()
    path = tmp_path / FILE_NAME
    text = path.read_text()
    assert text.count(":1") == 3 + 1  # and the version
    assert "lamp" not in text
    if sys.platform != "win32":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("text", ["", "[]", '{"version":2,"proofs":{}}', '{"version":1,"proofs":{"a":"b"}}'])
def test_without_a_count_there_is_no_proof(tmp_path: Path, text: str):
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(ConfigError, match=FILE_NAME):
        Proofs(tmp_path, IDENTITY, CODE).count()
