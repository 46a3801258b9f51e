"""primad: the machines you own run one large language model together."""

from importlib.metadata import version

__version__ = version("primad")
