"""Read the devices and models of a question: from files, built-in shapes and fleets, and the header of a GGUF."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from halda import DeviceProfile, LinkProfile, ModelProfile
from primad.errors import ConfigError
from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.gguf.shapes import shape
from primad.profiler.fleets import read_fleet
from primad.profiler.store import load_profiles


def read_model(path: Path | None, shape_name: str | None) -> ModelProfile:
    """Read the model of a file, of which the header is enough, or of a built-in shape. Raises ``ConfigError``,
    ``ModelError``."""
    if path is not None and shape_name is not None:
        raise ConfigError("--model and --model-shape: give one of them; both name the model")
    if path is not None:
        return model_profile(open_model(path, header_only=True))
    if shape_name is not None:
        return shape(shape_name)
    raise ConfigError(
        "which model? give --model FILE.gguf, or, if you have no file yet, --model-shape with a name of 'primad fit', "
        "as in llama3-8b"
    )


def read_devices(paths: Sequence[Path], fleet: str | None) -> tuple[tuple[DeviceProfile, ...], tuple[LinkProfile, ...]]:
    """Read the devices of profile files or folders and of a fleet, with the fleet's links. Raises ``ConfigError``."""
    model = next((path for path in paths if path.suffix == ".gguf"), None)
    if model is not None:
        raise ConfigError(f"{model}: is a model, not the profile of a device; give it with --model")
    found = None if fleet is None else read_fleet(fleet)
    devices = () if found is None else found.devices
    return (*devices, *load_profiles(*paths)), () if found is None else found.links
