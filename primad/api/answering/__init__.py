"""From a request that a dialect understood to the text of its answer: what all dialects share."""
