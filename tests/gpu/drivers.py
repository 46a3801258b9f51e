"""Vulkan drivers that fail as real ones do, compiled here and passed to the loader in ``VK_ICD_FILENAMES``."""

from __future__ import annotations

import json
import os
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

_LOSES = """
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

typedef void (*call)(void);
typedef call (*finder)(void *, const char *);
static finder of_device;
static int32_t (*submit_there)(void *, uint32_t, const void *, void *);

static void *there(const char *name) {{ return dlsym(dlopen("{library}", RTLD_NOW | RTLD_LOCAL), name); }}

static int32_t submit(void *queue, uint32_t count, const void *infos, void *fence) {{
  if (access("{lost}", F_OK) == 0) return -4; /* VK_ERROR_DEVICE_LOST */
  return submit_there(queue, count, infos, fence);
}}
static call find_of_device(void *device, const char *name) {{
  call found = of_device(device, name);
  if (strcmp(name, "vkQueueSubmit") != 0) return found;
  submit_there = (void *)found;
  return (call)submit;
}}

call vk_icdGetInstanceProcAddr(void *instance, const char *name) {{
  call found = ((finder)there("vk_icdGetInstanceProcAddr"))(instance, name);
  if (strcmp(name, "vkGetDeviceProcAddr") != 0) return found;
  of_device = (finder)found;
  return (call)find_of_device;
}}
call vk_icdGetPhysicalDeviceProcAddr(void *instance, const char *name) {{
  return ((finder)there("vk_icdGetPhysicalDeviceProcAddr"))(instance, name);
}}
int32_t vk_icdNegotiateLoaderICDInterfaceVersion(uint32_t *version) {{
  return ((int32_t (*)(uint32_t *))there("vk_icdNegotiateLoaderICDInterfaceVersion"))(version);
}}
"""
"""A driver that wraps another one and loses its device as soon as a file exists."""


def _compiled(folder: Path, source: str) -> Path:
    """The manifest of a driver compiled from ``source``."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler for a driver that fails")
    written, library, manifest = folder / "driver.c", folder / "driver.so", folder / "driver.json"
    written.write_text(source)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, written, "-ldl"], check=True)
    content = {"file_format_version": "1.0.0", "ICD": {"library_path": str(library), "api_version": "1.2.0"}}
    manifest.write_text(json.dumps(content))
    return manifest


def broken_driver(folder: Path, fault: str) -> dict[str, str]:
    """The environment in which the only Vulkan driver fails with ``fault`` when it is loaded."""
    return {"VK_ICD_FILENAMES": str(_compiled(folder, _SOURCE.format(fault=FAULTS[fault])))}


def with_lost_gpu(folder: Path, lost: Path) -> dict[str, str]:
    """The environment that shows the software device by two drivers; one loses it once the file ``lost`` exists."""
    manifest = os.environ.get("VK_ICD_FILENAMES") or next(
        (str(path) for path in Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json")), ""
    )
    if not manifest:
        pytest.skip("needs Mesa's software device, to show it by a driver that fails")
    library = json.loads(Path(manifest).read_text())["ICD"]["library_path"]
    failing = _compiled(folder, _LOSES.format(library=library, lost=lost))
    return {"VK_ICD_FILENAMES": os.pathsep.join((manifest, str(failing))), "GGML_VK_VISIBLE_DEVICES": "0,1"}
