"""primad: the machines you own run one large language model together."""

__version__ = "0.1.0"
