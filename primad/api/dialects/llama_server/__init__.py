"""llama-server's own paths: tokens, templates, properties, and completions in its shape."""
