"""``colibri run PROMPT``: one answer on standard output, streamed; attaches to the running group or starts one."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from cli.client import Session, clean_text, make_streams_safe, open_session, write_text
from shared.run.client import Answer


@click.command("run")
@click.argument("prompt", required=False)
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the model's chat format.")
@click.option("--ids", metavar="LIST", help="The prompt as token ids, e.g. 1,2,3 (for a model without tokenizer).")
@click.option("--system", metavar="TEXT", help="Instruction put before the prompt.")
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="Stop after N tokens at the latest.")
@click.option("--temperature", type=float, metavar="T", help="0 takes the likeliest token; default 1.")
@click.option("--top-p", type=float, metavar="P", help="Sample among the likeliest tokens that make up P.")
@click.option("--seed", type=int, metavar="N", help="Same seed, same text.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; up to four times.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.option("--profile", "with_profile", is_flag=True, help="Show where the time went.")
@click.option("--record-routing", metavar="FILE", help="Start the group with this trace file, for `colibri cache-sim`.")
@click.option("--model", metavar="DIR", help="Model to start when no group is running; default the embedded one.")
@click.option("--url", metavar="URL", help="Use the server at this address.")
@click.option("--run-dir", metavar="DIR", help="Use the group of this run directory.")
def command(
    prompt: str | None, raw: bool, ids: str | None, system: str | None, max_tokens: int | None, temperature: float | None,
    top_p: float | None, seed: int | None, stop: tuple[str, ...], as_json: bool, with_profile: bool,
    record_routing: str | None, model: str | None, url: str | None, run_dir: str | None,
) -> int:  # fmt: skip
    """Answer one PROMPT (or standard input) and leave."""
    make_streams_safe()
    if system is not None and (raw or ids):
        raise click.UsageError("--system belongs to the chat format; with --raw write it into the prompt")
    if ids is not None and prompt is not None:
        raise click.UsageError("give a prompt or --ids, not both")
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
            click.echo(json.dumps(answer.as_json()))
        elif sys.stderr.isatty():
            click.echo(f"[{answer.summary()}]", err=True)
    return 0


def read_prompt(prompt: str | None) -> str:
    """The argument, or standard input when it is absent or ``-``. Raises UsageError when there is neither."""
    if prompt is None or prompt == "-":
        if prompt is None and sys.stdin.isatty():
            raise click.UsageError('a prompt is needed: colibri run "your question", or text on standard input')
        prompt = sys.stdin.read().removesuffix("\n")
    prompt = clean_text(prompt)
    if not prompt:
        raise click.UsageError("the prompt is empty")
    return prompt


def parse_ids(text: str) -> list[int]:
    """``1,2,3`` or ``1 2 3``. Raises UsageError."""
    try:
        ids = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        ids = []
    if not ids or min(ids) < 0:
        raise click.UsageError(f"--ids takes token ids like 1,2,3; got {text!r}")
    return ids


def request_of(
    text: str | list[int], *, raw: bool, system: str | None = None, options: dict[str, Any] | None = None
) -> tuple[str, dict[str, Any]]:
    """(path, body) of the request; options that are None are left out. Ids come back as ids."""
    body = {key: value for key, value in (options or {}).items() if value is not None}
    if isinstance(text, list):
        return "/v1/completions", {"prompt": text, "return_token_ids": True, "ignore_eos": True, **body}
    if raw:
        return "/v1/completions", {"prompt": text, **body}
    messages = [{"role": "system", "content": clean_text(system)}] if system is not None else []
    return "/v1/chat/completions", {"messages": [*messages, {"role": "user", "content": text}], **body}


def _print_answer(session: Session, path: str, body: dict[str, Any], answer: Answer, is_quiet: bool) -> None:
    """Streams the text to standard output; the line is ended even when the answer breaks off."""
    try:
        for piece in session.client.stream(path, body, answer):
            if not is_quiet:
                write_text(piece)
    finally:
        if not is_quiet and not answer.text and answer.token_ids:
            write_text(",".join(map(str, answer.token_ids)) + "\n")
        elif not is_quiet and answer.text and not answer.text.endswith("\n"):
            write_text("\n")


def _run_profiled(session: Session, path: str, body: dict[str, Any], answer: Answer, as_json: bool) -> int:
    from cli.profile import Profiler
    from cli.profile_report import as_json as report_json
    from cli.profile_report import format_report

    if session.run_dir is None:
        raise click.UsageError("--profile reads the group's memory on this machine; use --run-dir instead of --url")
    with Profiler(session.run_dir) as profiler:
        profiler.start()
        _print_answer(session, path, body, answer, as_json)
        report = profiler.stop(answer)
    if as_json:
        click.echo(json.dumps({**answer.as_json(), "profile": report_json(report)}))
    else:
        write_text("\n" + "\n".join(format_report(report)) + "\n")
    return 0
