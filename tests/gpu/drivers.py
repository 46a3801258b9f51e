"""Vulkan drivers that fail as real ones do: compiled here, and named to the loader by ``VK_ICD_FILENAMES``."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

_ABORTS = "abort();"
_HANGS = "for (;;) pause();"
_HAS_NO_MEMORY = "return -1; /* VK_ERROR_OUT_OF_HOST_MEMORY */"
FAULTS = {"aborts": _ABORTS, "hangs": _HANGS, "has no memory": _HAS_NO_MEMORY}
_SOURCE = """
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int create(const void *info, const void *allocator, void **instance) {{ {fault} return -1; }}
static int extensions(const char *layer, uint32_t *count, void *properties) {{ *count = 0; return 0; }}

void *vk_icdGetInstanceProcAddr(void *instance, const char *name) {{
  if (strcmp(name, "vkCreateInstance") == 0) return (void *)create;
  if (strcmp(name, "vkEnumerateInstanceExtensionProperties") == 0) return (void *)extensions;
  return NULL;
}}
int vk_icdNegotiateLoaderICDInterfaceVersion(uint32_t *version) {{ if (*version > 3) *version = 3; return 0; }}
"""


def broken_driver(folder: Path, fault: str) -> dict[str, str]:
    """The environment in which the only Vulkan driver fails so when it is woken."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler for a driver that fails")
    source, library, manifest = folder / "driver.c", folder / "driver.so", folder / "driver.json"
    source.write_text(_SOURCE.format(fault=FAULTS[fault]))
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    content = {"file_format_version": "1.0.0", "ICD": {"library_path": str(library), "api_version": "1.2.0"}}
    manifest.write_text(json.dumps(content))
    return {"VK_ICD_FILENAMES": str(manifest)}
