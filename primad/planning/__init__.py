"""Explain what a plan would be and why, without a daemon, network or model weights.

``question`` turns the wishes into a question, ``whatif`` changes it, and ``explain`` answers it with the values of
``schema``, which ``table`` and ``plot`` show.
"""
