"""Layer files on this device and on their way to it: the cache, transfers, who serves them."""
