"""The model that the head serves: facts of its file, and the owner's options."""
