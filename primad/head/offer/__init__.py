"""The models that a head offers: which there are, which are loaded, and who waits for one."""
