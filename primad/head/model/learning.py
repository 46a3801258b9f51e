"""What a head learns from requests: stored in its home folder, used by later plans, and reported if a plan is wrong."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from halda import DeviceProfile
from primad.api.http.status import CompletionFigures, WrongTerm, wrong_line
from primad.planning.corrections import (
    MAX,
    MIN,
    Corrections,
    DeviceFactors,
    Verdict,
    learnt,
    prompts_learnt,
    verdict_of,
)
from primad.planning.forecast import Forecast
from primad.ring.messages import Status
from primad.system.files import write_whole

logger = logging.getLogger(__name__)

VERSION: Final = 1
"""Increased when the factors change their meaning."""
WORTH_A_PLAN: Final = 0.1
"""A factor that has changed by this much since planning may have made another plan better."""
MAX_KEPT: Final = 256
"""Number of devices and links in the file; the latest are kept."""


class _Link(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    target: str
    factor: float


class _Device(msgspec.Struct, frozen=True, kw_only=True):
    device: str
    stamp: str
    compute: float
    disk: float
    prompts: float = 1.0


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    devices: list[_Device]
    links: list[_Link]


def corrections_file(home: Path) -> Path:
    """Return where the head with this ``home`` stores corrections."""
    return home / "corrections.json"


def read_corrections(home: Path) -> Corrections:
    """Return the stored corrections; empty if the file is damaged or of another version."""
    try:
        kept = msgspec.json.decode(corrections_file(home).read_bytes(), type=_Kept)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Corrections()
    if kept.version != VERSION:
        return Corrections()
    figures = [figure for each in kept.devices for figure in (each.compute, each.disk, each.prompts)]
    figures += [each.factor for each in kept.links]
    if not all(MIN <= figure <= MAX for figure in figures):
        return Corrections()
    return Corrections(
        devices={
            each.device: DeviceFactors(stamp=each.stamp, compute=each.compute, disk=each.disk, prompts=each.prompts)
            for each in kept.devices
        },
        links={(each.source, each.target): each.factor for each in kept.links},
    )


def correction_line(home: Path, profile: DeviceProfile) -> str | None:
    """Return the line for the owner about the corrections for the head's own device; None without any."""
    factors = read_corrections(home).of(profile)
    changed = {"computing": factors.compute, "computing prompts": factors.prompts, "reading its disk": factors.disk}
    parts = [f"{what} takes {factor:.2f} times as long" for what, factor in changed.items() if factor != 1.0]
    return f"corrected by measurements: {', '.join(parts)}" if parts else None


class Learning:
    """The ``corrections`` of a head, and whether its forecasts are right."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self.corrections = read_corrections(home)
        self._is_settled = True
        self._figures_of: dict[int, float] = {}
        self._looked: dict[int, Corrections] = {}

    def planned(self, profiles: Iterable[DeviceProfile]) -> Corrections:
        """Return the corrections for a plan for devices with these ``profiles``."""
        self.corrections = self.corrections.noted(profiles)
        return self.corrections

    def completed(
        self, epoch: int, forecast: Forecast, statuses: Mapping[str, Status | None]
    ) -> CompletionFigures | None:
        """Learn from a response of ring ``epoch``, whose devices report ``statuses``; return its times per token.

        Logs once that a plan is wrong, and again if the time has doubled or halved since. None if nothing was measured
        cleanly.
        """
        plan, prediction, used = forecast.plan, forecast.prediction, forecast.corrections
        verdict = None if prediction is None else verdict_of(plan, prediction, used, statuses)
        if verdict is None:
            return None
        now = learnt(self.corrections, verdict, plan, used)
        if forecast.question is not None:
            now = prompts_learnt(now, plan, forecast.question, used, statuses)
        self._is_settled = now == self.corrections
        self._keep(now)
        measured = _figures_of(verdict)
        if measured.wrong is not None and self._is_news(epoch, verdict):
            logger.warning("epoch %d: %s", epoch, wrong_line(measured))
        return measured

    def worth_a_plan(self, epoch: int, forecast: Forecast) -> set[str]:
        """Return the devices whose corrections changed enough since ring ``epoch`` was planned that plans may differ,
        once for each change.

        Empty while responses still change factors: a single response may be chance.
        """
        if not self._is_settled:
            return set()
        before = self._looked.get(epoch, forecast.corrections)
        changed = self.corrections.changed(before, forecast.plan, WORTH_A_PLAN)
        if changed:
            self._looked[epoch] = self.corrections
        return changed

    def forget(self, epoch: int) -> None:
        """Forget ring ``epoch``, which has ended."""
        self._figures_of.pop(epoch, None)
        self._looked.pop(epoch, None)

    def _is_news(self, epoch: int, verdict: Verdict) -> bool:
        before = self._figures_of.get(epoch)
        if before is not None and abs(math.log2(verdict.measured_s / before)) < 1:
            return False
        self._figures_of[epoch] = verdict.measured_s
        return True

    def _keep(self, corrections: Corrections) -> None:
        if corrections == self.corrections:
            return
        self.corrections = corrections
        devices = list(corrections.devices.items())[-MAX_KEPT:]
        links = list(corrections.links.items())[-MAX_KEPT:]
        kept = _Kept(
            version=VERSION,
            devices=[
                _Device(device=name, stamp=each.stamp, compute=each.compute, disk=each.disk, prompts=each.prompts)
                for name, each in devices
            ],
            links=[_Link(source=source, target=target, factor=factor) for (source, target), factor in links],
        )
        try:
            write_whole(corrections_file(self._home), msgspec.json.format(msgspec.json.encode(kept), indent=2) + b"\n")
        except OSError as exc:
            logger.warning("%s: cannot save corrections: %s", corrections_file(self._home), exc.strerror or exc)


def _figures_of(verdict: Verdict) -> CompletionFigures:
    worst = verdict.worst
    return CompletionFigures(
        tpot_ms=verdict.measured_s * 1e3,
        predicted_tpot_ms=verdict.predicted_s * 1e3,
        wrong=WrongTerm(
            term=worst.kind,
            device=worst.device,
            predicted_ms=worst.predicted_s * 1e3,
            measured_ms=worst.measured_s * 1e3,
            is_beyond=worst.is_beyond,
        )
        if verdict.is_off
        else None,
    )
