"""The devices of the cluster as its head sees them: who is there, and what each can do."""
