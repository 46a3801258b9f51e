"""Who belongs to the ring: a pure core that is told events and returns what to do."""
