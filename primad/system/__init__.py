"""This machine: its memory, its processes and tasks, files that only the owner may read."""
