"""The server: connections, who may ask, whose turn it is, and what every route does the same way."""
