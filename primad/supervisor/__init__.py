"""primad as a service: what systemd, launchd and Windows' Task Scheduler are told about it, and the commands that tell them.

The texts are made from values (``service``, ``systemd``, ``launchd``, ``task_scheduler``) and touch nothing.
"""
