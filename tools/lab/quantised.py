"""Other forms of a model's weights, made with llama.cpp's own quantiser from those that there are."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import llama_cpp as llama

from tools.lab import LabError

FORMS: Final = {
    "f16": llama.LLAMA_FTYPE_MOSTLY_F16,
    "q8_0": llama.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_1": llama.LLAMA_FTYPE_MOSTLY_Q4_1,
    "q2_k": llama.LLAMA_FTYPE_MOSTLY_Q2_K,
}


def quantised(model: Path, form: str, folder: Path, threads: int) -> Path:
    """``model`` in one of the ``FORMS``, in a file in ``folder``. Raises ``LabError``."""
    target = folder / f"{model.stem}-as-{form}.gguf"
    params = llama.llama_model_quantize_default_params()
    params.allow_requantize, params.nthread, params.ftype = True, threads, FORMS[form]
    if llama.llama_model_quantize(str(model).encode(), str(target).encode(), params):
        raise LabError(f"{model}: llama.cpp cannot make {form} of it")
    return target
