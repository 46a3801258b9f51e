"""OpenAI's dialect: its schema, responses and errors."""
