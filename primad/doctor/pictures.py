"""Whether models of this device take pictures and audio: the libraries of llama.cpp, and encoders that models lack."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from primad.doctor.findings import Finding, finding, gib
from primad.engine.build import PACKAGE
from primad.gguf.hub import PREFIX
from primad.gguf.projectors import MARK
from primad.library.headers import HeaderCache
from primad.library.library import LibraryModel, read_library
from primad.library.places import model_places
from primad.settings.config import models_folder

_SHOWN: Final = 6
_REPOSITORY: Final = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureFacts:
    """``has_mtmd`` is whether llama.cpp has its encoders' library (None: llama.cpp is missing), ``models`` are those of
    the library that have an encoder, or could have one."""

    has_mtmd: bool | None
    models: tuple[LibraryModel, ...]


def gather_pictures(home: Path, folders: Sequence[Path]) -> PictureFacts:
    """Read the libraries' names and the models' headers; nothing is loaded or written."""
    places = model_places(folders, models_folder(home), os.environ, Path.home(), sys.platform)
    found = read_library(places, HeaderCache(home / "library.json", is_kept=False)).models
    models = [each for each in found if not each.problem and (each.projector is not None or each.lacks_encoder)]
    return PictureFacts(has_mtmd=_has_mtmd(), models=tuple(models))


def judge_pictures(facts: PictureFacts, python: str) -> list[Finding]:
    """Judge encoders; ``python`` is the interpreter to install with."""
    if facts.has_mtmd is None:
        return []  # another check says so
    if not facts.has_mtmd:
        text = f"{PACKAGE} has no libmtmd, which encodes images and audio: models accept text only"
        return [finding("pictures", "warning", text, f"{python} -m pip install --force-reinstall --no-deps {PACKAGE}")]
    used = [each for each in facts.models if each.sees or each.hears]
    refused = [each for each in facts.models if each.refused]
    lacking = [each for each in facts.models if each.lacks_encoder]
    found = [_judge_used(used)]
    found += [_judge_refused(each) for each in refused[:_SHOWN]]
    found += [_judge_lacking(each) for each in lacking[:_SHOWN]]
    if len(lacking) > _SHOWN:
        text = f"{len(lacking) - _SHOWN} more vision or audio models have no encoder here"
        found.append(finding("pictures", "note", text, "primad models --json"))
    return found


def _judge_used(models: Sequence[LibraryModel]) -> Finding:
    if not models:
        return finding("pictures", "ok", "llama.cpp has libmtmd; no model here has an encoder for images or audio")
    shown = [f"{each.name}: {_can(each)} ({gib(each.encoder_bytes)})" for each in models[:_SHOWN]]
    more = [f"{len(models) - _SHOWN} more"] if len(models) > _SHOWN else []
    text = f"with encoders, in memory while they are used: {', '.join([*shown, *more])}"
    return finding("pictures", "ok", text)


def _can(model: LibraryModel) -> str:
    return " and ".join(word for word, can in (("vision", model.sees), ("audio", model.hears)) if can)


def _judge_refused(model: LibraryModel) -> Finding:
    text = f"{model.name} accepts text only: {model.projector}: {model.refused}"
    return finding("pictures", "warning", text, f"primad serve --model '{model.name}' --{MARK} none")


def _judge_lacking(model: LibraryModel) -> Finding:
    text = f"{model.name} accepts images or audio, but its publisher's {MARK}-….gguf is not next to {model.files[0]}"
    return finding("pictures", "note", text, _command(model))


def _command(model: LibraryModel) -> str:
    """Return the command that fetches the encoder of ``model`` with the program that keeps it."""
    if "Ollama" in model.sources:
        return f"ollama pull {model.name}"
    name = next((each for each in model.names if each.startswith(PREFIX)), "")
    if "primad" in model.sources and name:
        return f"primad pull {name}"
    named = next((each for each in model.names if _REPOSITORY.fullmatch(each.partition(":")[0])), "")
    where = f"https://huggingface.co/{named.partition(':')[0]}" if named else "its publisher's page"
    return f"primad serve --model '{model.name}' --{MARK} FILE    (from {where})"


def _has_mtmd() -> bool | None:
    spec = find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    return any(folder.glob("lib/*mtmd*")) and (folder / "mtmd_cpp.py").exists()
