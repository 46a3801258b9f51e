"""Child processes: start one, talk to it, notice its end."""
