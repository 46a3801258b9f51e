"""OpenAI's Responses, stateless: each request has the whole conversation."""
