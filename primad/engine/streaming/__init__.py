"""What stays in memory, what streams from the disk, and when it is read."""
