"""Ollama's dialect: chat, generate, and facts about models."""
