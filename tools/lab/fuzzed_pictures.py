"""Send files through a tiny model's media process, and record the outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from primad.daemon.pictures import PictureService
from primad.errors import EngineError, RequestError, RingError
from tools.lab.mmproj import write_encoder
from tools.synth import write_model


@dataclass(slots=True)
class Tally:
    """Outcomes of files, by mutation: accepted, or refused with a message."""

    accepted: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[str, bytes, str]] = field(default_factory=list)
    """Mutation, file, and how it ended the process."""
    child_bytes: int = 0
    """Maximum memory of the process between two files."""


async def fuzz(service: PictureService, files: Iterable[tuple[str, bytes]]) -> Tally:
    """Send each of ``files`` through ``service``."""
    found = Tally()
    for done, data in files:
        try:
            await service.encode(data, "a file")
            found.accepted[done.split()[0]] += 1
        except RequestError as exc:
            found.refused[str(exc).split(":")[1][:40]] += 1
        except (RingError, EngineError) as exc:
            found.findings.append((done, data, str(exc)))
        if service.pid is not None:
            found.child_bytes = max(found.child_bytes, psutil.Process(service.pid).memory_info().rss)
    return found


def tiny_service(folder: Path, *, hears: bool = False) -> PictureService:
    """Return the media process of a tiny model for pictures, or for audio if it ``hears``; its files are written to
    ``folder``."""
    shape = write_model(folder / "model.gguf", architecture="gemma4" if hears else "llama")
    write_encoder(folder / "encoder.gguf", "gemma4ua" if hears else "janus_pro", shape.width)
    return PictureService(folder / "encoder.gguf", folder / "model.gguf", threads=1, kept_bytes=0)
