"""Ollama's dialect: chat, generate, and what it says of models."""
