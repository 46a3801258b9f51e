"""What head and worker share: starting and stopping, loading layers, watching memory, pairing, the owner's pauses."""
