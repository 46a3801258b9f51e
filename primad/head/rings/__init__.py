"""Rings of devices: planned, formed, serving, backed up."""
