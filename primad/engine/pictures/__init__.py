"""Turns pictures into hidden states: an encoder (llama.cpp's libmtmd) in its own process, since files are untrusted.

* ``headers.py`` checks a file by its first bytes, before anything is decoded.
* ``encoder.py`` decodes and encodes; ``process.py`` is its process, ``messages.py`` has the messages.
"""
