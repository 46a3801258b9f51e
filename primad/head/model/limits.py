"""What the owner of a head lets it use of other devices: nothing while one is paused, or so much memory at most.

A device's own owner has limits and a pause there (``--max-ram``, ``primad pause``); this is the head's side, kept in its
home by device name, and plans obey it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from halda import DeviceProfile
from primad.api.page.desk import Loan
from primad.errors import ConfigError
from primad.settings.config import NAME
from primad.system.files import write_whole

LEAST_RAM_BYTES: Final = 64 << 20
MOST_KEPT: Final = 1024
FILE_NAME: Final = "lending.json"


class Lending:
    """The loans of one head. A damaged file is as none."""

    def __init__(self, home: Path) -> None:
        self._path = home / FILE_NAME
        self._loans: dict[str, Loan] = {}
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            kept = msgspec.json.decode(self._path.read_bytes(), type=list[Loan])
            self._loans = {loan.device: loan for loan in kept[:MOST_KEPT] if NAME.fullmatch(loan.device)}

    def of(self, device: str) -> Loan:
        """What may be used of ``device``."""
        return self._loans.get(device, Loan(device=device))

    def put(self, loan: Loan) -> bool:
        """Keep ``loan``; whether less may be used than before. Raises ``ConfigError``."""
        if loan.ram_bytes is not None and loan.ram_bytes < LEAST_RAM_BYTES:
            raise ConfigError(
                f"{loan.device}: {loan.ram_bytes} bytes are too few to lend; pause it, or give 64 MiB or more"
            )
        before = self.of(loan.device)
        loans = {name: each for name, each in self._loans.items() if name != loan.device}
        if loan != Loan(device=loan.device):
            loans[loan.device] = loan
        if len(loans) > MOST_KEPT:
            raise ConfigError(f"{self._path}: has {MOST_KEPT} devices, which is the most")
        try:
            write_whole(self._path, msgspec.json.encode(list(loans.values())))
        except OSError as exc:
            raise ConfigError(f"{self._path}: cannot be written: {exc.strerror or exc}") from exc
        self._loans = loans
        return _ram(loan) < _ram(before)

    def unpaused(self, names: Iterable[str]) -> frozenset[str]:
        """Those of ``names`` that may be used."""
        return frozenset(name for name in names if not self.of(name).is_paused)

    def apply(self, profile: DeviceProfile) -> DeviceProfile:
        """``profile`` with no more memory than may be used."""
        most = self.of(profile.device).ram_bytes
        if most is None or most >= profile.ram_available_bytes:
            return profile
        gpu = profile.gpu
        if gpu is not None and gpu.unified_memory:
            gpu = replace(gpu, vram_available_bytes=min(gpu.vram_available_bytes, most))
        return replace(profile, ram_available_bytes=most, gpu=gpu)


def _ram(loan: Loan) -> float:
    """What it amounts to, for comparing."""
    if loan.is_paused:
        return 0.0
    return float("inf") if loan.ram_bytes is None else float(loan.ram_bytes)
