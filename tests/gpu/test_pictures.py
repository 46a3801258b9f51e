"""The picture encoder on a GPU: its embeddings match the CPU's except for the last bits, and are cached per GPU."""

from __future__ import annotations

import numpy as np
import pytest

from primad.daemon.encoder_child import EncoderChild
from primad.engine.pictures.messages import EmbeddedRun, LoadEncoder
from tools.lab.mmproj import noise, write_encoder
from tools.synth import write_model


def values(picture):
    return np.concatenate([np.frombuffer(run.content, "<f4") for run in picture.runs if isinstance(run, EmbeddedRun)])


@pytest.mark.parametrize(("kind", "architecture"), [("gemma3", "gemma3"), ("qwen2vl_merger", "qwen2vl")])
async def test_a_gpu_encodes_pictures_as_the_cpu_does_except_for_the_last_bits(kind, architecture, gpu, tmp_path):
    shape = write_model(tmp_path / "model.gguf", architecture=architecture)
    write_encoder(tmp_path / "encoder.gguf", kind, shape.width)
    found = []
    for where in ("", gpu.id):
        load = LoadEncoder(
            path=str(tmp_path / "encoder.gguf"), model=str(tmp_path / "model.gguf"), threads=2, gpu=where
        )
        child = EncoderChild(load)
        found.append(await child.encode(noise(1)))
        await child.close()
    own, its = found
    assert its.encoder == f"{own.encoder}-{gpu.id}"
    assert np.allclose(values(its), values(own), rtol=0.05, atol=0.05 * np.abs(values(own)).max())
