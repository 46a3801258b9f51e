"""The struct of a tensor in llama.cpp's graphs, as in 0.3.36 (ggml.h)."""

from __future__ import annotations

import ctypes


class Tensor(ctypes.Structure):
    """The leading fields of ``struct ggml_tensor``. If ``name`` equals ``ggml_get_name``, the fields before it agree
    too."""

    _fields_ = (
        ("type", ctypes.c_int32),
        ("buffer", ctypes.c_void_p),
        ("elements", ctypes.c_int64 * 4),
        ("strides", ctypes.c_size_t * 4),
        ("op", ctypes.c_int32),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("sources", ctypes.c_void_p * 10),
        ("view_source", ctypes.c_void_p),
        ("view_offset", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
    )
