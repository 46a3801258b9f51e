"""Splits the text of a response into calls, thoughts and text: one reader, and the formats of model families. Pure."""
