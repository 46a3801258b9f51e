"""Pictures become rows for the model: an encoder (llama.cpp's libmtmd) in a process of its own, since files are strangers'.

* ``headers.py`` judges a file by its first bytes, before anything is decoded.
* ``encoder.py`` decodes and encodes; ``process.py`` is its process, ``messages.py`` what that is asked.
"""
