"""The commands: one file a command. They check options, report errors and start the work."""
