"""The devices of the cluster as its head sees them: their presence and abilities."""
