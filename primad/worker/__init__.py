"""A worker: it lends a hand to a head, and keeps what it has loaded."""
