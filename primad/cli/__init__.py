"""The commands: one file a command. They read flags, say what is wrong with them, and start what does the work."""
