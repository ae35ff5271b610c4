"""``colibri run PROMPT``: one answer on standard output, streamed; attaches to the running group or starts one."""

from __future__ import annotations

import sys
from typing import Any

import click

from cli.client import Session, open_session
from cli.options import MODEL, PATH_TEXT, RUN_DIR, SEED, TEMPERATURE, TOP_P, URL
from cli.prompt import parse_ids, read_prompt, request_of
from cli.show import show
from shared.run.client import Answer
from shared.run.terminal import complain, is_terminal, say_json, write

MAX_STOPS = 4
NEEDS_RUN_DIR = "--profile reads the group's memory on this machine; use --run-dir instead of --url"


@click.command("run")
@click.argument("prompt", required=False)
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the model's chat format.")
@click.option("--ids", metavar="LIST", help="The prompt as token ids, e.g. 1,2,3 (for a model without tokenizer).")
@click.option("--system", metavar="TEXT", help="Instruction put before the prompt.")
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="Stop after N tokens at the latest.")
@click.option("--temperature", type=TEMPERATURE, metavar="T", help="0 takes the likeliest token; default: the model's.")
@click.option("--top-p", type=TOP_P, metavar="P", help="Sample among the likeliest tokens that make up P.")
@click.option("--seed", type=SEED, metavar="N", help="Same seed, same text.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; up to four times.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.option("--profile", "with_profile", is_flag=True, help="Show where the time went.")
@click.option(
    "--record-routing",
    metavar="FILE",
    type=PATH_TEXT,
    help="Start the group with this trace file, for `colibri cache-sim`.",
)
@MODEL
@URL
@RUN_DIR
def command(
    prompt: str | None, raw: bool, ids: str | None, system: str | None, max_tokens: int | None, temperature: float | None,
    top_p: float | None, seed: int | None, stop: tuple[str, ...], as_json: bool, with_profile: bool,
    record_routing: str | None, model: str | None, url: str | None, run_dir: str | None,
) -> int:  # fmt: skip
    """Answer one PROMPT and leave. Text that is piped in is put behind it, or is the prompt where none is given.

    What would steer the terminal in an answer is written out, like \\x1b; --json has the text exactly.
    """
    if system is not None and (raw or ids):
        raise click.UsageError("--system belongs to the chat format; with --raw write it into the prompt")
    if ids is not None and prompt is not None:
        raise click.UsageError("give a prompt or --ids, not both")
    if len(stop) > MAX_STOPS:
        raise click.UsageError(f"--stop may be given {MAX_STOPS} times, got {len(stop)}")
    if with_profile and url is not None and run_dir is None:
        raise click.UsageError(NEEDS_RUN_DIR)
    text = read_prompt(prompt) if ids is None else parse_ids(ids)
    options = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "stop": list(stop) or None,
    }
    path, body = request_of(text, raw=raw, system=system, options=options)
    with open_session(url, run_dir, model, record_routing=record_routing) as session:
        answer = Answer()
        if with_profile:
            return _run_profiled(session, path, body, answer, as_json)
        _print_answer(session, path, body, answer, as_json)
        if as_json:
            say_json(answer.as_json())
        elif is_terminal(sys.stderr):
            complain(f"[{answer.summary()}]")
    return 0


def _print_answer(session: Session, path: str, body: dict[str, Any], answer: Answer, is_quiet: bool) -> None:
    """Streams the text to standard output; the line is ended even when the answer breaks off."""
    try:
        for piece in session.client.stream(path, body, answer):
            if not is_quiet:
                write(piece)
    finally:
        if not is_quiet and not answer.text and answer.token_ids:
            write(",".join(map(str, answer.token_ids)) + "\n")
        elif not is_quiet and answer.text and not answer.text.endswith("\n"):
            write("\n")


def _run_profiled(session: Session, path: str, body: dict[str, Any], answer: Answer, as_json: bool) -> int:
    from cli.profile.collect import Profiler
    from cli.profile.report import as_json as report_json
    from cli.profile.report import parts_of

    assert session.run_dir is not None
    with Profiler(session.run_dir) as profiler:
        profiler.start()
        _print_answer(session, path, body, answer, as_json)
        report = profiler.stop(answer)
    if as_json:
        say_json({**answer.as_json(), "profile": report_json(report)})
    else:
        show(["", *parts_of(report)])
    return 0
