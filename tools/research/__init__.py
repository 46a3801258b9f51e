"""For research, not shipped: the paper's plan compared with primad's.

Tools and tests import it.
"""
