"""The page at ``/``: chat, the ring as a picture, the devices. Static files, and their requests under ``/ui``."""
