"""The composition root: builds the daemon of a worker (``worker.py``) or of the head (``head.py``) and runs it."""
