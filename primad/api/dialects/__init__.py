"""The dialects that clients speak: each makes jobs of requests, and its own words of answers."""
