"""primad as a service: what systemd, launchd and Windows' Task Scheduler are told about it, and the commands that tell them.

The texts and the steps are made from values (``service``, ``systemd``, ``launchd``, ``task_scheduler``, ``steps``) and touch
nothing; ``machine`` finds out what this machine has, and carries steps out.
"""
