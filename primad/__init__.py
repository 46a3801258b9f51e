"""primad: one large language model across the machines you own."""

__version__ = "0.1.0"
