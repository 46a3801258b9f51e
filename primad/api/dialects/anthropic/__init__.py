"""Anthropic's dialect: messages, their streams, and token counts."""
