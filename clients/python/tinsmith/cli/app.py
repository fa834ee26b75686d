"""Puts the commands together: those of this package, and those of installed extras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated

import typer

from tinsmith.cli import (
    chat,
    checkpoints,
    doctor,
    environments,
    hyperparams,
    jobs,
    keys,
    models,
    plan,
    recipe,
    rollouts,
    runs,
    sample,
    servers,
    sessions,
    usage,
)
from tinsmith.errors import ConfigurationError
from tinsmith.version import __version__

GROUP = "tinsmith.commands"

DESCRIPTIONS = {
    "up": "Run all services in this process, on loopback; print the address and the key.",
    "models": "Make models.",
    "certificates": "Certificates of pods.",
    "database": "The PostgreSQL database of pods.",
    "env": "Environments of your own, served as a process.",
}
"""What commands of other packages do, so that the list of commands imports none of them."""

_PASS_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """Return the application.

    Args:
        arguments: The command line. Only the extra command that it names is imported: the others
            may be slow to import, or lack their packages.
    """
    app = typer.Typer(
        help="Post-training as a service on your own cluster.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    app.add_typer(runs.app, name="runs")
    app.add_typer(checkpoints.app, name="checkpoints")
    app.add_typer(rollouts.app, name="rollouts")
    app.add_typer(keys.app, name="keys")
    app.add_typer(jobs.app, name="jobs")
    app.add_typer(environments.app, name="environments")
    # A copy: an extra may add commands to the group, and must not to the module's own.
    ours = typer.Typer(no_args_is_help=True)
    ours.info.help = models.app.info.help
    ours.registered_commands = list(models.app.registered_commands)
    groups = {"models": ours}
    app.add_typer(ours, name="models")
    app.add_typer(sessions.app, name="sessions")
    app.add_typer(usage.app, name="usage")
    app.command("sample")(sample.sample)
    app.command("chat")(chat.chat)
    app.command("audit")(sessions.audit)
    # The command shows its own help, since that depends on the recipe.
    app.command("run", context_settings={"help_option_names": []})(recipe.run)
    app.command("eval", context_settings={"help_option_names": []})(recipe.evaluate)
    app.command("plan")(plan.plan)
    app.command("hyperparams")(hyperparams.hyperparams)
    app.command("doctor")(doctor.doctor)
    app.command("status")(servers.status)
    app.command("use")(servers.use)
    words = [argument for argument in arguments if not argument.startswith("-")]
    wanted = words[0] if words else None
    for entry_point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        if entry_point.name in groups:
            if entry_point.name == wanted:
                _extend(groups[entry_point.name], entry_point, words[1:])
        else:
            _add(app, entry_point, load=entry_point.name == wanted)
    return app


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"tinsmith {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Take the options that stand before a command."""


def _extend(group: typer.Typer, entry_point: EntryPoint, words: Sequence[str]) -> None:
    """Add the commands of an extra to a group of this package.

    Raises:
        ConfigurationError: If the command that is asked for may be one that is not installed.
    """
    names = [command.name for command in group.registered_commands]
    try:
        extra = entry_point.load()
    except ImportError as error:
        if words and words[0] not in names:
            package = entry_point.module.partition(".")[0].removeprefix("tinsmith_")
            raise _missing_extra(f"{entry_point.name} {words[0]}", package, error) from error
        return
    group.registered_commands += extra.registered_commands


def _add(app: typer.Typer, entry_point: EntryPoint, *, load: bool) -> None:
    package = entry_point.module.partition(".")[0]
    command: typer.Typer | Callable[..., object]
    if load:
        try:
            command = entry_point.load()
        except ImportError as error:
            command = _explain(entry_point.name, package.removeprefix("tinsmith_"), error)
    else:
        command = _explain(entry_point.name, package.removeprefix("tinsmith_"), None)
        command.__doc__ = DESCRIPTIONS.get(
            entry_point.name, f"See `tinsmith {entry_point.name} --help`."
        )
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=entry_point.name)
    elif load and command.__name__ != "missing":
        app.command(entry_point.name)(command)
    else:
        app.command(entry_point.name, context_settings=_PASS_ARGUMENTS)(command)


def _explain(name: str, extra: str, error: ImportError | None) -> Callable[..., object]:
    """Return a command that says which extra it needs."""

    def missing() -> None:
        raise _missing_extra(name, extra, error)

    missing.__doc__ = f"Needs `pip install 'tinsmith[{extra}]'`."
    return missing


def _missing_extra(name: str, extra: str, error: ImportError | None) -> ConfigurationError:
    reason = f" ({error})" if error else ""
    return ConfigurationError(
        f"`tinsmith {name}` needs packages that are not installed{reason}",
        remedy=f"pip install 'tinsmith[{extra}]'",
    )
