"""The model that the head serves: what its file says, and what its owner asked for."""
