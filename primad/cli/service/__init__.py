"""primad as a service of systemd, launchd or Windows' Task Scheduler: their configuration, and commands.

Texts and steps are pure values (``service``, ``systemd``, ``launchd``, ``task_scheduler``, ``steps``); ``machine``
inspects this machine and carries out steps.
"""
