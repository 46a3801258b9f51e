"""``primad doctor``: what could keep this device from serving, each finding with the next command to type.

A check gathers facts (the shell: sockets, files, commands) and judges them (pure functions ``judge_...``, which the tests
ask). ``examine`` runs them all at once, each with a deadline of its own.
"""
