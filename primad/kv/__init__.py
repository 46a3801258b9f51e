"""KV cells as content, like layers: known by a key, kept as files, moved between devices."""
