"""For research, not shipped: the plan as the paper has it, and a simulator that plays a plan event by event."""
