"""From a parsed request to the text of its response: shared by all dialects."""
