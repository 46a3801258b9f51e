"""The devices of the cluster as the head sees them: their presence and abilities."""
