"""Is a model cut exactly? Tried on a tiny one of the same layers, in child processes, and kept as a verdict."""
