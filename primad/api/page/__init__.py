"""The page at ``/``: chat, the ring as a picture, the devices. Static files, and what they ask for under ``/ui``."""
