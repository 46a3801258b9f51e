"""Speculation: who drafts tokens, how sure of them one must be, and which drafts are in flight."""
