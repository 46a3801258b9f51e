"""What head and worker share: starting and ending, loading layers, watching memory, pairing, the owner's wishes."""
