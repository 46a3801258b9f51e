"""What a killed daemon left in its home folder is removed by the next one."""

from __future__ import annotations

from primad.daemon.run import home_place
from primad.settings.config import load_config, open_home


def test_files_of_a_killed_daemon_are_removed_even_by_one_that_ends_before_it_writes_its_own(tmp_path):
    config = load_config({"home": tmp_path}, {})
    open_home(config)
    for name in ("window-7-0.gguf", "ring-7.log", "admin.json", "head.json"):
        (config.run / name).write_text("left")
    home_place(config)
    assert list(config.run.iterdir()) == []
