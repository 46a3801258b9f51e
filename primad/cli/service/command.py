"""``primad service``: ``serve`` or ``join`` as a service of this machine or of the user's session."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from primad.cli.commands import CommandGroup
from primad.cli.hub import library_model
from primad.cli.library import is_path
from primad.cli.output import err, out
from primad.errors import ConfigError, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from primad.cli.service.machine import Runner
    from primad.cli.service.service import DaemonService
    from primad.cli.service.steps import Manager, Place, ServiceStep
    from primad.settings.config import Config

service_app = CommandGroup(help="Run serve or join as a service.", no_args_is_help=True)

System = Annotated[
    bool, typer.Option("--system", help="A service of the machine, started with it [default: of your session].")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")]
ROLES: Final = ("join", "serve")
_OWN: Final = {"host", "port", "device"}
"""Options of serve with the names of configuration keys that mean something else."""
_MODELS: Final = ("model", "draft", "embedding")
"""Options that take a file, or a model by name."""


@service_app.command(
    "install",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def install(
    context: typer.Context,
    role: Annotated[str, typer.Argument(help="join or serve.", metavar="join|serve")],
    options: Annotated[
        list[str] | None, typer.Argument(help="The options of that command.", metavar="[OPTIONS]...")
    ] = None,
    system: System = False,
    run_as: Annotated[
        str | None,
        typer.Option(
            "--as", help="With --system: the user it runs as [default: primad, which is created].", show_default=False
        ),
    ] = None,
    no_start: Annotated[
        bool, typer.Option("--no-start", help="Do not start it now, but with the machine or session.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Install 'primad join' or 'primad serve' as a service, with the options after it, and start it.

    systemd, launchd or Windows' Task Scheduler starts it with the machine or session, and restarts it when it fails.
    Each step is printed. Pair the device once with 'primad pair --code CODE'.

    Examples:

        primad service install join --max-ram 8GB

        primad service install --system --dry-run join

        primad service install --system serve --model /srv/models/llama3-70b.gguf --wait 2
    """
    from primad.cli.service import steps

    wanted = _wanted(context, role, options or [])
    where = _place(system=system, dry_run=dry_run)
    service, new_user = _service(wanted, where, run_as)
    todo = steps.install(where, service, new_user=new_user, starts=not no_start)
    if dry_run and where.manager != "the Task Scheduler":
        _show(f"{where.file}:\n\n{steps.text_of(where, service).decode()}")
    _do(todo, dry_run=dry_run)
    if not dry_run:
        _hint(where, role, service)


@service_app.command("remove")
def remove(system: System = False, dry_run: DryRun = False) -> None:
    """Stop the service and remove it. Its home folder, with keys, trust and layers, is kept.

    Examples:

        primad service remove

        primad service remove --system --dry-run
    """
    from primad.cli.service import steps

    where = _installed(system=system, changes=True)
    if not where.file.exists():
        raise ConfigError(
            f"{where.file}: does not exist; the service belongs to a package of the system, which removes it"
        )
    _do(steps.remove(where), dry_run=dry_run)


@service_app.command("start")
def start(system: System = False) -> None:
    """Start the service.

    Examples:

        primad service start
    """
    from primad.cli.service import steps

    _do(steps.start(_installed(system=system, changes=True)))


@service_app.command("stop")
def stop(system: System = False) -> None:
    """Stop the service; a worker hands over first. It starts again with the machine or session.

    Examples:

        primad service stop
    """
    from primad.cli.service import steps

    _do(steps.stop(_installed(system=system, changes=True)))


@service_app.command("status")
def status(system: System = False) -> None:
    """Show the state of the service, and why it is not restarted if it gave up.

    The exit code is that of the service manager: 0 means that it runs.

    Examples:

        primad service status
    """
    from primad.cli.service import steps, systemd

    where = _installed(system=system)
    code = _show_command(steps.status(where))
    asks = steps.state(where)
    if asks is None:
        _show_command(steps.logs(where, 5, follow=False))
    elif code and (why := systemd.why_it_is_left(_runner().run(asks).output)) is not None:
        err.print(why)
    raise typer.Exit(code)


@service_app.command("logs")
def logs(
    system: System = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow new lines.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Number of last lines.", min=1, max=100_000)] = 50,
) -> None:
    """Show the log of the service.

    Examples:

        primad service logs

        primad service logs --follow --lines 200
    """
    from primad.cli.service import steps

    raise typer.Exit(_show_command(steps.logs(_installed(system=system), lines, follow=follow)))


@service_app.command(
    "hold",
    hidden=True,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def hold(
    context: typer.Context,
    role: Annotated[str, typer.Argument(metavar="join|serve")],
    options: Annotated[list[str] | None, typer.Argument(metavar="[OPTIONS]...")] = None,
) -> None:
    """Set systemd's memory limit from --max-ram in the service's options. A package's unit does this before it
    starts."""
    from primad.cli.service import steps
    from primad.settings.config import load_config
    from primad.settings.quantities import Share

    ram = load_config(_flags(_wanted(context, role, options or []))).limits.ram
    # A share refers to all memory that the service sees, which the limit would reduce.
    _do([steps.hold(None if isinstance(ram, Share) else ram)])


# ---- what is to run -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The role, its options as primad's command line parses them, and the words of those that were given."""

    role: str
    values: dict[str, Any]
    words: list[tuple[str, list[str]]]


def _wanted(context: Any, role: str, options: list[str]) -> _Wanted:
    """Parse the options by their command. Raises the same errors."""
    if role not in ROLES:
        raise ConfigError(f"{printable(role)}: not a service; install join or serve")
    command = context.find_root().command.get_command(context, role)
    theirs = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    for name in (word.partition("=")[0] for word in options):
        if name not in theirs and any(name in param.opts for param in context.command.params):
            raise ConfigError(f"{name}: belongs before {role}: 'primad service install {name} {role}'")
    judged = command.make_context(f"primad {role}", list(options))
    words = []
    for param in command.params:
        source = judged.get_parameter_source(param.name)
        if source is not None and source.name == "COMMANDLINE":
            words.append((param.name, _typed(param, judged.params[param.name])))
    given = {name for name, _ in words}
    if "code" in given:
        raise ConfigError("--code: works only once, and a service starts often; use 'primad pair --code'")
    if "api_key" in given:
        raise ConfigError("--api-key: every user here could read it in the service's file; give --api-key-file")
    return _Wanted(role, dict(judged.params), words)


def _typed(param: Any, value: Any) -> list[str]:
    """The command-line words of ``value``, with absolute paths."""
    name = max(param.opts, key=len)
    if isinstance(value, bool):
        return [name if value else max(param.secondary_opts, key=len)]
    typed_words = []
    for each in value if isinstance(value, list | tuple) else [value]:
        is_file = isinstance(each, Path) or param.name == "kv_cache"
        is_name = param.name in _MODELS and not is_path(each) and not each.exists()
        text = str(_full(each) if is_file and not is_name else each)
        typed_words += [f"{name}={text}"] if text.startswith("-") else [name, text]
    return typed_words


def _full(path: Path | str) -> Path | str:
    from primad.gguf.hub import hub_name

    if str(path) in ("auto", "off") or hub_name(Path(path).as_posix()) is not None:
        return path
    return Path(path).expanduser().absolute()


def _service(wanted: _Wanted, where: Place, run_as: str | None) -> tuple[DaemonService, bool]:
    """The service to run at ``where``, and whether its user has to be created."""
    from primad.cli.service import machine, systemd
    from primad.cli.service.service import DaemonService
    from primad.settings.config import default_home, load_config
    from primad.settings.quantities import bytes_of
    from primad.system.memory import memory

    if run_as is not None and not where.system:
        raise ConfigError(f"--as {run_as}: a service of your session runs as you; add --system")
    if run_as is not None and where.manager == "the Task Scheduler":
        raise ConfigError(f"--as {run_as}: Windows would ask for a password; leave it out")
    home = wanted.values["home"] or (machine.system_home(where.manager) if where.system else default_home())
    home = Path(home).expanduser().absolute()
    config = load_config(_flags(wanted) | {"home": home}, {})  # a service does not have the variables of this terminal
    ram = config.limits.ram
    limit = None if ram is None else bytes_of(ram, memory().total_bytes)
    # As bytes: a share would be of the service's own limit, which it sees as all memory.
    words = [*(each for name, typed in wanted.words if name not in ("home", "max_ram") for each in typed)]
    words += [] if limit is None else ["--max-ram", f"{limit}B"]
    user = (run_as or machine.default_user(where.manager)) if where.system else None
    list(_files(wanted, where))
    is_new = _judge_user(user, wanted, where) if user is not None else False
    is_linux = where.manager == "systemd"
    service = DaemonService(
        role="serve" if wanted.role == "serve" else "join",
        program=machine.program(),
        arguments=tuple(words),
        home=home,
        user=user,
        groups=machine.gpu_groups() if where.system and is_linux else (),
        max_ram_bytes=limit,
        writable=_writable(config),
        environment_file=Path(systemd.ENVIRONMENT_FILE) if where.system and is_linux else None,
        log=None if is_linux else home / where.log.name,
    )
    return service, is_new


def _flags(wanted: _Wanted) -> dict[str, Any]:
    """The options that are keys of the configuration."""
    return {key: value for key, value in wanted.values.items() if key not in _OWN}


def _writable(config: Config) -> tuple[Path, ...]:
    return () if config.kv_cache is None else (config.kv_cache,)


def _files(wanted: _Wanted, where: Place) -> Iterator[tuple[str, Path]]:
    """The files that the service reads, by option. A missing one raises ``ConfigError`` here rather than an error in a
    log."""
    from primad.gguf.hub import hub_name
    from primad.settings.config import load_config

    for name in (*_MODELS, "api_key_file"):
        given: Path | None = wanted.values.get(name)
        if given is None or hub_name(given.as_posix()) is not None or str(given) == "auto":
            continue
        path, option = given.expanduser().absolute(), f"--{name.replace('_', '-')}"
        if name in _MODELS and (model := library_model(given, lambda: load_config(_flags(wanted), {}))) is not None:
            path = model.files[0]
            if where.system:
                raise ConfigError(
                    f"{option} {given}: a service of the machine knows no models of yours; give the file, {path}"
                )
        if not path.exists():
            raise ConfigError(f"{option} {given}: no such file")
        yield option, path


def _judge_user(user: str, wanted: _Wanted, where: Place) -> bool:
    """Whether ``user`` has to be created. Raises ``ConfigError`` if the user may not run primad or read its files."""
    from primad.cli.service import machine, systemd

    if where.manager == "the Task Scheduler":
        return False
    account = machine.account(user)
    if account is None and user != systemd.SYSTEM_USER:
        raise ConfigError(f"--as {user}: no such user")
    who = account or machine.Account(None, frozenset())
    for path, runs in ((Path(machine.program()[0]), True), (Path(sys.executable), True)):
        for each in {path, path.resolve()}:
            if (there := machine.unreadable(each, who, runs=runs)) is not None:
                raise ConfigError(
                    f"{each}: {user} may not run it because of {there}; install primad where all users may run it, "
                    "such as in /opt or with a package, or choose another user with --as"
                )
    for option, path in _files(wanted, where):
        if (there := machine.unreadable(path, who)) is not None:
            raise ConfigError(
                f"{option} {path}: {user} may not read it because of {there}; allow that, or choose another user with "
                "--as"
            )
    return account is None


# ---- where it is ----------------------------------------------------------------------------------------------------


def _place(*, system: bool, dry_run: bool = False) -> Place:
    """The place of the service. Raises ``ConfigError`` if this user may not install it there."""
    from primad.cli.service import machine

    kind: Manager
    try:
        kind = machine.manager()
    except ConfigError:
        if not dry_run:
            raise
        kind = "systemd"
    if not dry_run:
        _judge_rights(kind, system=system)
    return machine.place(kind, system=system)


def _judge_rights(kind: Manager, *, system: bool) -> None:
    from primad.cli.service import machine

    if system and not machine.is_admin():
        how = "open a terminal as administrator" if kind == "the Task Scheduler" else "run it with sudo"
        raise ConfigError(f"--system: only root may change services of the machine; {how}")
    if not system and machine.is_admin() and kind != "the Task Scheduler":
        raise ConfigError("root has no session that lasts; give --system, or do it as yourself")


def _installed(*, system: bool, changes: bool = False) -> Place:
    """The installed service's place. Raises ``ConfigError`` if there is none that this user may change."""
    from primad.cli.service import machine

    kind = machine.manager()
    own, of_machine = machine.place(kind, system=False), machine.place(kind, system=True)
    packaged = kind == "systemd" and any((folder / of_machine.file.name).exists() for folder in machine.PACKAGED)
    if own.file.exists() and not system:
        found = own
    elif of_machine.file.exists() or packaged:
        found = of_machine
    else:
        raise ConfigError("no service is installed here; 'primad service install join' installs one")
    if changes:
        _judge_rights(kind, system=found.system)
    return machine.installed(found)


def _runner() -> Runner:
    from primad.cli.service.machine import Commands

    return Commands()


def _do(todo: list[ServiceStep], *, dry_run: bool = False) -> None:
    from primad.cli.service.machine import carry_out

    for step in todo:
        out.print(f"{'would ' if dry_run else ''}{step}")
        if not dry_run:
            carry_out([step], _runner())


def _show_command(command: Sequence[str]) -> int:
    """Run ``command`` on this terminal and return its exit code."""
    from primad.cli.service.machine import ServiceError

    try:
        return _runner().show(command)
    except OSError as exc:
        raise ServiceError(f"{command[0]}: cannot run: {exc.strerror or exc}") from exc


def _show(text: str) -> None:
    out.print(text)


def _hint(where: Place, role: str, service: DaemonService) -> None:
    """Print what to do next."""
    from primad.trust.trust import FILE_NAME

    sudo, home = (
        ("sudo ", f" --home {service.home}") if where.system and where.manager != "the Task Scheduler" else ("", "")
    )
    out.print(f"it is a service of {where.scope} now; 'primad service logs' shows its log")
    if role == "join" and not Path(service.home, FILE_NAME).exists():
        out.print(f"pair it with the code that the head shows: {sudo}primad pair{home} --code CODE")
    if role == "serve":
        out.print(f"a code for another device: {sudo}primad pair{home}")
    if where.manager == "systemd" and not where.system:
        err.print("it ends when you log out, unless you type: loginctl enable-linger")
