"""Embeddings from a model of their own, computed whole on the head in a process of its own."""
