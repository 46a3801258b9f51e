"""Old names are read, and written next to the new ones, for one version."""

from __future__ import annotations

import json

from primad.settings.old_names import KEYS, with_new_keys, with_old_keys


def test_a_key_of_before_is_read_as_the_new_one():
    for new, old in KEYS.items():
        assert json.loads(with_new_keys(json.dumps({old: 1, "x": {old: [2]}}).encode())) == {new: 1, "x": {new: [2]}}


def test_a_value_that_reads_like_an_old_key_stays():
    data = json.dumps({"name": "helped", "names": ["keeper", "alone"]}).encode()
    assert with_new_keys(data) == data


def test_each_new_key_is_written_under_its_old_name_as_well():
    content = with_old_keys({"devices": [{"read_ahead_bytes": 5, "name": "a"}], "single_device": ()})
    assert content["devices"] == [{"read_ahead_bytes": 5, "ahead_bytes": 5, "name": "a"}]
    assert content["alone"] == content["single_device"] == []
