"""Halda: given profiles of devices, links and a model, say which device computes which layers.

A pure library: profiles in, ``Plan`` out. No I/O, no clock, no import of primad.
"""

from halda.plan import Infeasible, LeftOut, Plan, Window
from halda.profile import DeviceProfile, GpuProfile, LayerProfile, LinkProfile, ModelProfile
from halda.search import arrange, solve

__all__ = [
    "DeviceProfile",
    "GpuProfile",
    "Infeasible",
    "LayerProfile",
    "LeftOut",
    "LinkProfile",
    "ModelProfile",
    "Plan",
    "Window",
    "arrange",
    "solve",
]
