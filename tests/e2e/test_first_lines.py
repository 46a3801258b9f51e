"""The output of ``serve`` and ``join`` is not buffered in a pipe, and commands find the head by themselves."""

from __future__ import annotations

import re

import pytest

from tests.e2e.cluster import heading, joined, primad


@pytest.mark.usefixtures("started_by_a_shell")
def test_awaited_devices_and_status_can_be_read_through_a_pipe_at_run_time(quick_model, new_home, cluster):
    home = new_home("head")
    with heading(quick_model, home, cluster, "--wait", 1, "--use-all") as head:
        head.run.wait_for("^waiting for 1 of 1 devices: start 'primad join' on the others$")
        with joined(new_home("worker"), cluster) as worker:
            head.run.wait_for(rf" is served at {re.escape(head.url)}/v1 with \d+ tokens of context\b")
            head.run.wait_for(r"^forecast: ")
            worker.wait_for("^computing layers .* for head$")
            with primad("status", PRIMAD_HOME=str(home)) as asked:
                asked.wait_for("^serving with 2 devices")
                assert asked.wait_end() == 0
