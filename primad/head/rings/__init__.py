"""Rings of devices: planned, formed, served from and kept."""
