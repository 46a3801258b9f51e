"""KV cells as content, like layers: identified by a key, stored as files, moved between devices."""
