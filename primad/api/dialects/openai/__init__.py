"""The OpenAI dialect of the HTTP interface: its schema, its answers, its errors."""
