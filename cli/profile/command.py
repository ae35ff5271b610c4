"""The command ``colibri profile``: of an answer to a prompt, or of whatever the group does meanwhile."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import click

from cli.client import open_session
from cli.options import MODEL, PATH, RUN_DIR, SEED, TEMPERATURE, FiniteRange, check_writable, write_result
from cli.profile.collect import Profiler
from cli.profile.report import as_json, parts_of
from cli.profile.trace import chrome_trace
from cli.prompt import parse_ids, read_prompt, request_of
from cli.show import show
from shared.errors import ConfigError
from shared.model.config_reader import read_json
from shared.run.client import Answer, Client, find_group
from shared.run.terminal import complain, say, say_json

MAX_WATCH_S = 86400.0


@click.command("profile")
@click.argument("prompt", required=False)
@click.option("--seconds", type=FiniteRange(0.1, MAX_WATCH_S), default=10.0, show_default=True, metavar="S",
              help="Without a prompt: how long to watch what others ask.")  # fmt: skip
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the model's chat format.")
@click.option("--ids", metavar="LIST", help="The prompt as token ids, e.g. 1,2,3 (for a model without tokenizer).")
@click.option("--prompt-tokens", type=click.IntRange(min=1), metavar="N", help="A made-up prompt of N token ids.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=64, show_default=True, metavar="N")
@click.option("--temperature", type=TEMPERATURE, default=0.0, show_default=True, metavar="T")
@click.option("--seed", type=SEED, default=0, show_default=True, metavar="N")
@click.option("--per-layer", is_flag=True, help="Also a table of layers.")
@click.option("--trace", "trace_path", metavar="FILE", type=PATH,
              help="Write all rows for Perfetto or chrome://tracing.")  # fmt: skip
@click.option("--json", "is_json", is_flag=True, help="Print the report as JSON.")
@MODEL
@click.option("--url", metavar="URL", help="Send the prompt here; rows still come from the group of the run directory.")
@RUN_DIR
def command(
    prompt: str | None,
    seconds: float,
    raw: bool,
    ids: str | None,
    prompt_tokens: int | None,
    max_tokens: int,
    temperature: float,
    seed: int,
    per_layer: bool,
    trace_path: Path | None,
    is_json: bool,
    model: str | None,
    url: str | None,
    run_dir: str | None,
) -> int:
    """Show where the time goes: of an answer to PROMPT, or of whatever the group does meanwhile."""
    if sum(given is not None for given in (prompt, ids, prompt_tokens)) > 1:
        raise click.UsageError("give one of a prompt, --ids and --prompt-tokens")
    if trace_path is not None:
        check_writable(trace_path, "--trace")
    text: str | list[int] | None = None
    if ids is not None or prompt_tokens is not None:
        text = parse_ids(ids) if ids is not None else []
    elif prompt is not None:
        text = read_prompt(prompt)
    with open_session(None, run_dir, model, may_start=text is not None) as session:
        assert session.run_dir is not None
        found = find_group(session.run_dir)
        if found is None:
            raise ConfigError(f"no group is running in {session.run_dir}; start one with colibri-up")
        with Profiler(session.run_dir) as profiler:
            answer: Answer | None = None
            profiler.start()
            if text is None:
                _watch(seconds, is_quiet=is_json)
            else:
                if prompt_tokens is not None:
                    text = make_ids(Path(found[0].model_dir), prompt_tokens, seed)
                answer = Answer()
                options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
                path, body = request_of(text, raw=raw, options=options)
                client = session.client if url is None else Client(url)
                for _ in client.stream(path, body, answer):
                    pass
            profile = profiler.stop(answer)
            rows = profiler.rows
    if trace_path is not None and rows is not None:
        write_result(trace_path, json.dumps(chrome_trace(rows)))
    if is_json:
        say_json({**as_json(profile), **({"text": answer.text} if answer else {})})
        return 0
    lines = parts_of(profile, has_layers=per_layer)
    if answer is not None:
        shown = ascii(answer.text) if answer.text or not answer.token_ids else f"ids {answer.token_ids[:20]} ..."
        lines = [f"answer: {shown}", answer.summary(), "", *lines]
    show(lines)
    if trace_path is not None:
        say(f"trace: {trace_path} (open it in https://ui.perfetto.dev or chrome://tracing)")
    return 0


def make_ids(model_dir: Path, n_tokens: int, seed: int) -> list[int]:
    """``n_tokens`` ids below the model's vocabulary, the same for the same seed."""
    try:
        vocab = int(read_json(model_dir / "config.json")["vocab_size"])
    except (ConfigError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{model_dir}/config.json does not say the size of the vocabulary") from None
    return random.Random(seed).choices(range(vocab), k=n_tokens)


def _watch(seconds: float, *, is_quiet: bool) -> None:
    """Waits; Ctrl-C ends the watch early and the report comes all the same."""
    if not is_quiet:
        complain(f"watching for {seconds:g} s (Ctrl-C ends it) ...")
    try:
        time.sleep(seconds)
    except KeyboardInterrupt:
        return
