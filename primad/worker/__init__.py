"""A worker: it computes for a head, and keeps what it has loaded."""
