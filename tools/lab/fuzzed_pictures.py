"""Files through the process for pictures of a tiny model, and what became of them."""

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
    """What became of files, by what was done to them: accepted, or refused with which words."""

    accepted: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[str, bytes, str]] = field(default_factory=list)
    """What was done, the file, and how it ended the process."""
    child_bytes: int = 0
    """The most that the process held between two files."""


async def fuzz(service: PictureService, files: Iterable[tuple[str, bytes]]) -> Tally:
    """Each of ``files`` through ``service``."""
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
    """The process for pictures, or for sound if it ``hears``, of a tiny model, whose files are written to ``folder``."""
    shape = write_model(folder / "model.gguf", architecture="gemma4" if hears else "llama")
    write_encoder(folder / "encoder.gguf", "gemma4ua" if hears else "janus_pro", shape.width)
    return PictureService(folder / "encoder.gguf", folder / "model.gguf", threads=1, kept_bytes=0)
