"""The HTTP server: connections, access, fair turns, and the behaviour shared by all routes."""
