"""``primad doctor``: what could keep this device from serving, each finding with the next command to type.

A check gathers facts (the shell: sockets, files, commands) and judges them (pure functions ``judge_...``, which the
tests call). ``examine`` runs all checks concurrently, each with its own deadline.
"""
