"""The API dialects of clients: each turns requests into jobs, and results into its own response format."""
