"""Decides which devices belong to the ring: a pure core that takes events and returns effects."""
