"""Tokens that may come next: who drafts them, how sure of them one must be, and what of them is on its way."""
