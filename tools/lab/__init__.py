"""A home network on one Linux machine: devices are namespaces behind a bridge, each with its own limits.

``Homelab(fleet)`` is the context manager that tests use; ``tools/homelab`` is the same from the command line. Never
imported by primad.
"""

from tools.lab.fleet import DeviceSpec, Fleet, load_fleet
from tools.lab.homelab import Homelab
from tools.lab.names import LabError
from tools.lab.requirements import missing

__all__ = ["DeviceSpec", "Fleet", "Homelab", "LabError", "load_fleet", "missing"]
