"""For research, not shipped: the plan as the paper has it, and a simulator that plays a plan event by event.

Tools and tests import it; ``primad plan --solver paper`` looks for it when it runs.
"""
