"""The container file and the compose file: complete, with commands that primad accepts and no needless rights."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from primad.cli.main import app

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "packaging" / "container"
KNOWN = {
    "FROM",
    "ARG",
    "COPY",
    "RUN",
    "ENV",
    "USER",
    "WORKDIR",
    "VOLUME",
    "EXPOSE",
    "STOPSIGNAL",
    "HEALTHCHECK",
    "ENTRYPOINT",
    "CMD",
}
VARIABLE = re.compile(r"\$\{(\w+):\?[^}]*\}")


def instructions() -> list[list[tuple[str, str]]]:
    """The instructions of the container file, a list for each stage."""
    text = re.sub(r"^#.*\n", "", (FOLDER / "Containerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    stages: list[list[tuple[str, str]]] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, rest = line.partition(" ")
        if name == "FROM":
            stages.append([])
        stages[-1].append((name, " ".join(rest.split())))
    return stages


def check_accepted(words: list[str]) -> None:
    """Assert that ``primad`` accepts these words."""
    command = app.built.commands[words[0]]
    command.make_context(words[0], words[1:])


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    assert isinstance(found, dict)
    return found


def test_the_image_is_built_from_files_that_exist() -> None:
    build, image = instructions()
    for name, rest in (*build, *image):
        assert name in KNOWN
        if name == "COPY" and not rest.startswith("--from=build"):
            assert [source for source in rest.split()[:-1] if not (ROOT / source).exists()] == []


def test_the_image_runs_primad_as_a_user_without_rights() -> None:
    last = dict(instructions()[-1])
    assert last["USER"] == "primad"
    assert json.loads(last["ENTRYPOINT"]) == ["primad"]
    check_accepted(json.loads(last["CMD"]))
    assert f'PRIMAD_HOME="{last["VOLUME"]}"' in last["ENV"]


def test_the_healthchecks_are_programs(compose: dict[str, Any]) -> None:
    of_image = json.loads(dict(instructions()[-1])["HEALTHCHECK"].partition("CMD ")[2])
    of_head = shlex.split(compose["services"]["head"]["healthcheck"]["test"])
    for python, option, code in (of_image, of_head):
        assert (python, option) == ("python", "-c")
        imports = "; ".join(part for part in code.split("; ") if part.startswith(("import", "from")))
        exec(imports, {})
        compile(code, "healthcheck", "exec")


def test_the_compose_file_has_a_head_and_two_workers_that_primad_can_run(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert list(services) == ["head", "worker-1", "worker-2"]
    for service in services.values():
        check_accepted([VARIABLE.sub("model.gguf", word) for word in service["command"]])
        assert (service["cap_drop"], service["read_only"]) == (["ALL"], True)
        assert {each.partition(":")[0] for each in service["volumes"]} - {"./models"} <= set(compose["volumes"])
    assert (FOLDER / services["head"]["build"]["context"]).resolve() == ROOT


def test_the_endpoint_is_for_this_machine_and_requires_a_key(compose: dict[str, Any]) -> None:
    head = compose["services"]["head"]
    assert head["ports"] == ["127.0.0.1:8080:8080"]
    assert VARIABLE.fullmatch(head["environment"]["PRIMAD_API_KEY"])
