"""``colibri``: the tools around the group. Subcommands are loaded when they are called, so that each starts fast."""

from __future__ import annotations

import shared.run.first  # noqa: F401

# isort: split

import importlib
from typing import NoReturn

import click

from shared.run.program import EXIT_INTERRUPTED, run_program
from shared.run.terminal import complain

COMMANDS = {
    "chat": ("cli.chat:command", "Talk to the model in the terminal."),
    "run": ("cli.run:command", "Answer one prompt."),
    "profile": ("cli.profile.command:command", "Show where the time of an answer goes."),
    "convert": ("cli.convert:command", "Make a container from a Hugging Face checkpoint, here or at the hub."),
    "estimate": ("cli.estimate:command", "Say what a checkpoint would become here, before it is fetched or converted."),
    "inspect": ("cli.inspect:command", "Show what a container holds."),
    "verify": ("cli.verify:command", "Read a whole container and compare every checksum."),
    "mirror": ("cli.mirror:command", "Copy experts to a second drive, to be read from both."),
    "quality": ("cli.quality.command:command", "Measure what a container's formats cost against its checkpoint."),
    "doctor": (
        "cli.doctor.command:command",
        "Say what this machine offers, what is advisable, and the command for it.",
    ),
    "plan": ("cli.plan:command", "Show how memory would be shared out on this machine."),
    "ram": ("cli.ram:command", "Show or change the memory budget of the running group."),
    "cache-sim": ("cli.cache_sim.command:command", "Judge residency policies on recorded routing."),
    "synth": ("cli.synth:command", "Write a container of random weights, for measurements."),
    "bench": ("cli.bench:command", "Measure this machine and how much of it kernels, store, decode and prefill use."),
}
"""Name -> (where the click command is, one line of help)."""


class LazyGroup(click.Group):
    """A group that imports a subcommand's module only when that subcommand is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Help without importing every subcommand."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="colibri-moe", prog_name="colibri")
def cli() -> None:
    """Colibri runs mixture-of-experts models that are larger than memory. Start the group itself with colibri-up."""


def main(argv: list[str] | None = None) -> NoReturn:
    """Entry point. Errors are one sentence on stderr and an exit code: 2 usage, 70 fault, 74 output, 78 configuration."""
    run_program("colibri", lambda: _body(argv))


def _body(argv: list[str] | None) -> int:
    try:
        status = cli.main(argv, standalone_mode=False)
    except click.ClickException as error:
        _show_usage(error)
        return error.exit_code
    except click.Abort:
        complain("colibri: stopped")
        return EXIT_INTERRUPTED
    return status if isinstance(status, int) else 0


def _show_usage(error: click.ClickException) -> None:
    """click's own words, on our way out: they repeat what was given, and that may be the name of a file."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        complain(error.format_message())
        return
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is not None:
        complain(f"{context.get_usage()}\nTry '{context.command_path} --help' for help.\n")
    complain(f"Error: {error.format_message()}")


if __name__ == "__main__":
    main()
