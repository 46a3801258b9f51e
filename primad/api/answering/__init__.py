"""Shared by all dialects: from a parsed request to the text of its response."""
