"""Decides what stays in memory and what streams from disk, and reads it in time."""
