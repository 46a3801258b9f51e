"""OpenAI's Responses, without any state: what was said comes with each request."""
