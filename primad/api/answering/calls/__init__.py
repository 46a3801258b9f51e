"""From the text of a response to its calls, thoughts and text: one reader, and the formats of model families. Pure."""
