"""From the text of an answer to what it calls, thinks and says: one reader, and the forms of model families. Pure."""
