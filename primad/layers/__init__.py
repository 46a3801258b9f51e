"""Layer files on this device and in transfer to it: the cache, transfers, and the server."""
