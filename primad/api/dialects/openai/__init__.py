"""The OpenAI dialect of the HTTP interface: its schema, responses and errors."""
