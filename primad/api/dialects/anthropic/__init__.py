"""Anthropic's dialect: messages, their streams, and counts of their tokens."""
