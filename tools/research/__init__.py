"""For research, not shipped: the plan as the paper has it, set beside ours.

Tools and tests import it.
"""
