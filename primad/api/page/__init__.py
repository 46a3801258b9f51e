"""The web page at ``/``: chat, a picture of the ring, the devices. Static files, and their requests under ``/ui``."""
