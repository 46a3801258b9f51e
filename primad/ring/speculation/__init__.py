"""Tokens that may come next: who guesses them, how sure of them one must be, and what of them is on its way."""
