"""Check whether a model can be cut exactly: tried on a tiny model with the same layers, in child processes; the verdict
is kept."""
