"""The library of models: every GGUF model on this device by name, also those of other programs, which are only read.

    places.py      where programs keep models on this system
    stores.py      models in a folder, LM Studio's folder, a Hugging Face cache or llama.cpp's
    ollama.py      models in Ollama's store
    headers.py     facts from the beginning of a file; cached by path, size and time
    names.py       which model a typed name means
    library.py     all models together
    settings.py    models.toml: settings of a model
    pulling.py     downloads and deletions of a running head; pull_progress.py: the progress of one

A file that cannot be used is one line in the list, and affects no other.
"""
