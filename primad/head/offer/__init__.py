"""The models that a head offers: which exist, which are loaded, and which requests wait for one."""
