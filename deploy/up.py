"""``colibri-up [MODEL]``: starts the process group, reports until it can serve, keeps it until Ctrl-C, stops it.

Owns what the user sees; ``launch`` does the work. Exit codes: 0 stopped as asked, 70 a service failed, 78 a setting, the
model directory or the machine does not allow the start.
"""

from __future__ import annotations

import shared.run.first  # noqa: F401

# isort: split

import argparse
import contextlib
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from deploy.supervisor_conf import WITHOUT_THREADS
from shared.errors import EXIT_FAULT, EXIT_OK, ColibriError, ConfigError
from shared.messages.control import ServiceState
from shared.run.address import is_loopback, url_of
from shared.run.config import Settings, load_settings
from shared.run.forks import wait_readable
from shared.run.program import OutputLost, ReaderGone, run_program
from shared.run.settings import add_flags, declared
from shared.run.terminal import complain, say, say_json

NAME = "colibri-up"


def make_parser() -> argparse.ArgumentParser:
    """All flags: what to do, and the settings as they are declared."""
    parser = _Parser(
        prog="colibri-up",
        description="Start the Colibri process group on a model directory (without one: the embedded model).",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="model directory, made by `colibri convert`")
    add_flags(parser.add_argument_group("settings").add_argument, declared(Settings))
    add("--config", metavar="FILE", help="settings from a TOML file; flags win over it")
    add("--daemon", action="store_true", help="return when the group is ready and leave it running")
    add("--status", action="store_true", help="show the group of this run directory")
    add("--json", action="store_true", help="with --status: as JSON")
    add("--stop", action="store_true", help="let running requests finish, then stop the group of this run directory")
    add(
        "--keep-warm",
        action="store_true",
        help="with --stop: leave the weights in memory for the next start of the model",
    )
    add("--drop-warm", action="store_true", help="free the memory that was kept warm; no running group is touched")
    return parser


def main() -> NoReturn:
    """Console entry point; ends the process."""
    os.environ.update(WITHOUT_THREADS)
    run_program(NAME, lambda: run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """The exit code of ``colibri-up`` with these arguments. Raises ColibriError."""
    args = make_parser().parse_args(argv)
    signals = _Signals()
    try:
        _check_combination(args)
        names = [each.name for each in declared(Settings) if hasattr(args, each.name)]
        settings = load_settings(args.config, {name: getattr(args, name) for name in names})
        if args.status:
            return _status(settings, args.json)
        if args.stop:
            lines = _stop(settings, signals, args.keep_warm) + (_drop_warm(settings) if args.drop_warm else [])
        elif args.drop_warm:
            lines = _drop_warm(settings)
        else:
            return _up(settings, args.daemon, signals)
        say("\n".join(lines))  # last, for it may fail
        return EXIT_OK
    except OSError as error:  # of the run directory: everything else has its own sentence
        where = f"{error.filename}: " if error.filename else ""
        raise ConfigError(
            f"{where}{error.strerror or error}. The run directory must be writable and have space; --run-dir names another."
        ) from None


def _check_combination(args: argparse.Namespace) -> None:
    """A start, --status, --stop and --drop-warm are different things to do; ConfigError where two are asked for."""
    asked = [flag for flag in ("daemon", "status", "stop", "drop_warm") if getattr(args, flag)]
    if len(asked) > 1 and asked != ["stop", "drop_warm"]:
        first, second = (f"--{flag.replace('_', '-')}" for flag in asked[:2])
        raise ConfigError(f"{first} and {second} ask for different things: give one of them.")
    if args.keep_warm and not args.stop:
        raise ConfigError("--keep-warm says how a group ends: give it together with --stop.")
    if args.keep_warm and args.drop_warm:
        raise ConfigError("--keep-warm and --drop-warm ask for different things: give one of them.")
    if args.json and not args.status:
        raise ConfigError("--json is the form of --status: give both.")
    empty = [flag for flag in ("model", "run_dir", "host", "huge_dir") if getattr(args, flag) == ""]
    if empty or "" in (args.mirror or ()):
        name = f"--{(empty or ['mirror'])[0].replace('_', '-')}"
        raise ConfigError(f"{'MODEL' if name == '--model' else name} is empty; leave it out for the default.")


class _Parser(argparse.ArgumentParser):
    """One sentence for a wrong flag instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        complain(f"{self.prog}: {message}. `{self.prog} --help` lists the flags.")
        sys.exit(2)


class _Signals:
    """Counts Ctrl-C and SIGTERM. The first asks, the second is immediate."""

    def __init__(self) -> None:
        self.count = 0
        self.name = ""
        self._read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if sig == signal.SIGHUP and signal.getsignal(sig) == signal.SIG_IGN:
                continue  # nohup: the end of the terminal is nothing to us
            signal.signal(sig, self._on_signal)

    def _on_signal(self, sig: int, _frame: object) -> None:
        self.count += 1
        self.name = "Ctrl-C" if sig == signal.SIGINT else signal.Signals(sig).name

    def wait(self, timeout_s: float) -> None:
        """Sleeps, but not through a signal."""
        if wait_readable(self._read, timeout_s):
            os.read(self._read, 64)

    @property
    def is_urgent(self) -> bool:
        return self.count > 1


def _say(text: str) -> None:
    """A line about a group that lives: nobody has to hear it."""
    try:
        say(text)
    except ReaderGone:
        pass
    except OutputLost as lost:  # raised once; that must not end the group
        with contextlib.suppress(OSError):
            complain(f"{NAME}: {lost}; the group goes on without it")


def _up(settings: Settings, is_daemon: bool, signals: _Signals) -> int:
    from deploy import rundir
    from shared.memory.segments import sweep_dead_runs

    from deploy import launch  # isort: skip

    begin = time.monotonic()
    run_dir = launch.run_dir_of(settings)
    rundir.prepare(run_dir)
    lock_fd = rundir.take_lock(run_dir)
    launch.wait_services_gone(run_dir)
    port = launch.claim_port(settings.host, settings.port)
    rundir.clean_leftovers(run_dir)
    keeper = launch.spawn_keeper(run_dir, lock_fd)
    try:
        sweep_dead_runs()
        plan = launch.make_plan(settings, run_dir, port, lambda text: _say(f"colibri-up: {text}"))
        _say(_summary(plan))
        if settings.slots == "all" and plan.ledger.n_slots < plan.ledger.n_experts:
            _say(_clamped(plan.ledger))
        for note in plan.notes:
            _say(f"note: {note}")
        group = launch.start(plan, lock_fd, keeper)
    except BaseException:
        launch.dismiss_keeper(keeper)
        raise
    try:
        _report_until_ready(group, signals)
        if signals.count:
            _say(f"colibri-up: {signals.name} while starting")
            group.stop()
            return EXIT_OK
    except ColibriError:
        group.stop()
        raise
    except BaseException:
        group.stop()
        raise
    _say(f"ready after {time.monotonic() - begin:.1f} s: {url_of(settings.host, port)}  (OpenAI API under /v1)")
    if not is_loopback(settings.host):
        _say(f"note: everyone who reaches {settings.host or 'this machine'} can use this server: it asks for no key.")
    if is_daemon:
        group.detach()
        _say(
            f"running in the background; `colibri-up --stop{_run_dir_hint(settings, run_dir)}` ends it. Logs: {run_dir}/log"
        )
        return EXIT_OK
    _say("Ctrl-C stops it.")
    return _keep(group, signals)


def _report_until_ready(group: Any, signals: _Signals) -> None:
    said: dict[str, str] = {}
    for status in group.wait_ready():
        if signals.count:
            return
        for service in status.services if status else ():
            words = service.state + (f": {service.stage}" if service.stage else "")
            if words not in (ServiceState.ABSENT, ServiceState.STARTING) and said.get(service.service) != words:
                said[service.service] = words
                _say(f"  {service.service:10} {words}")


def _keep(group: Any, signals: _Signals) -> int:
    """The foreground: until a signal comes or the group can't go on."""
    exit_code = EXIT_OK
    while not signals.count:
        if group.keeper.poll() is not None:
            is_clean = group.keeper.returncode == 0
            _say(
                "stopped."
                if is_clean
                else f"colibri-up: supervisor ended unexpectedly (exit {group.keeper.returncode})"
            )
            group.stop()
            return EXIT_OK if is_clean else EXIT_FAULT
        words = group.given_up()
        if words:
            complain(f"{NAME}: {words}")
            exit_code = EXIT_FAULT
            break
        signals.wait(0.2)
    if signals.count:
        _say(f"{signals.name}: running requests may finish (again: stop at once) ...")
        n_cut = group.drain(signals.name, lambda: signals.is_urgent or group.keeper.poll() is not None)
        if n_cut:
            _say(f"{n_cut} requests did not finish in time and were ended.")
    group.stop()
    _say("stopped.")
    return exit_code


def _summary(plan: Any) -> str:
    from shared.container.mirror import drives_words

    config, ledger = plan.config, plan.ledger
    experts = (
        f"{config.n_slots:,} of {ledger.n_experts:,} experts fit"
        if config.n_slots < ledger.n_experts
        else "all experts fit"
    )
    warm = f", {_size(plan.adopts.n_bytes)} of it still warm" if plan.adopts else ""
    copies = ""
    if config.mirrors:
        copies = f"\nexperts also from {', '.join(config.mirrors)}: {drives_words(plan.n_drives, config.drive_bytes_s)}"
    return (
        f"model {config.model_name} ({plan.spec.family}): {_size(ledger.total_bytes)} of {_size(ledger.budget_bytes)} memory"
        f"{warm}, {experts}, context {config.max_context:,} x {config.max_sequences}, "
        f"{config.n_drafts or 'no'} drafts, {config.n_threads} threads{copies}"
    )


def _clamped(ledger: Any) -> str:
    missing = (ledger.n_experts - ledger.n_slots) * ledger.slot_bytes
    return (
        f"note: slots for all {ledger.n_experts:,} experts would take {_size(missing)} more than the budget; "
        f"{ledger.n_slots:,} fit, the others are read when they are wanted."
    )


def _size(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 30):.1f} GiB" if n_bytes >= 1 << 30 else f"{n_bytes / (1 << 20):.0f} MiB"


def _run_dir_hint(settings: Settings, run_dir: Path) -> str:
    return f" --run-dir {shlex.quote(str(run_dir))}" if settings.run_dir else ""


def _status(settings: Settings, as_json: bool) -> int:
    from deploy import launch

    kept = [warm.describe() for warm in kept_sets(settings)]
    try:
        group = launch.describe(launch.run_dir_of(settings))
    except ConfigError as error:
        raise ConfigError("\n".join([str(error), *kept])) from None
    if as_json:
        say_json(group | {"kept_warm": kept}, indent=1)
        return EXIT_OK
    say(f"{group['model']} at {group['url']}: {'ready' if group['ready'] else group['detail']}")
    say(f"{group['n_running']} requests running, {group['n_waiting']} waiting; run directory {group['run_dir']}")
    say(f"{'service':<11}{'pid':>8}  {'state':<10}{'incarnation':>12}  stage")
    for service in group["services"]:
        name, pid, state, stage = (service[key] for key in ("name", "pid", "state", "stage"))
        say(f"{name:<11}{pid:>8}  {state:<10}{service['incarnation']:>12}  {stage}".rstrip())
    for line in kept:
        say(line)
    return EXIT_OK


def kept_sets(settings: Settings) -> list[Any]:
    from shared.memory import warm_sets

    return warm_sets.find_sets(warm_sets.known_dirs(settings.huge_dir))


def _drop_warm(settings: Settings) -> list[str]:
    """Returns what there is to say."""
    from shared.memory import warm_sets

    freed = []
    for warm in kept_sets(settings):
        warm_sets.drop(warm)
        freed.append(f"freed: {warm.describe()}")
    return freed or ["nothing is kept warm."]


def _stop(settings: Settings, signals: _Signals, keep_warm: bool) -> list[str]:
    """Returns what there is to say."""
    from deploy import launch

    run_dir = launch.run_dir_of(settings)
    try:
        huge_dir = launch.huge_dir_of(run_dir)
        n_cut = launch.stop_running(run_dir, lambda: signals.is_urgent, keep_warm)
    except ConfigError:  # no group, or none any more
        if not launch.end_leftovers(run_dir):
            raise
        return ["stopped what was left of a group that had died."]
    lines = ["stopped." if not n_cut else f"stopped; {n_cut} requests did not finish in time and were ended."]
    if keep_warm and huge_dir is None:
        lines.append(
            "note: nothing could be kept: this group's memory was private to its processes. `colibri doctor` tells more."
        )
    elif keep_warm:
        lines += [warm.describe() for warm in kept_sets(settings)]
    return lines


if __name__ == "__main__":
    main()
