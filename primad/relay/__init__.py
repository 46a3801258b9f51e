"""The API on every device: a worker relays requests to its head, over a connection like all others between devices."""
