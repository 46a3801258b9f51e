"""The commands: one file per command. They check options, report errors and start the work."""
