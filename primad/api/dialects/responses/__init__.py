"""OpenAI's Responses API, stateless: each request has the whole conversation."""
