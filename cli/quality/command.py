"""``colibri quality``: how much a container's formats cost, against the checkpoint it was made from."""

from __future__ import annotations

import os
from pathlib import Path

import click

from cli.options import PATH, declaration
from cli.show import progress, show
from shared.run.terminal import say_json

KV_DTYPE = declaration("kv_dtype")
_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


@click.command("quality")
@click.argument("model", metavar="MODEL", type=PATH)
@click.option("--against", "source", metavar="SOURCE", type=PATH, required=True,
              help="The Hugging Face checkpoint that MODEL was converted from.")  # fmt: skip
@click.option("--text", "text_path", metavar="FILE", type=PATH,
              help='Text to compare over; a .jsonl has lines {"text": ...}. Default: models/heldout.jsonl.')  # fmt: skip
@click.option("--ids", metavar="LIST", help="Token ids instead of a text, e.g. 1,2,3.")
@click.option("--random", "n_random", type=click.IntRange(min=2), metavar="N",
              help="N made-up token ids instead of a text (for models of random weights).")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of --random.")
@click.option("--tokens", "n_tokens", type=click.IntRange(min=2), default=4096, show_default=True, metavar="N",
              help="Use at most N tokens. Time and memory grow with them.")  # fmt: skip
@click.option("--window", type=click.IntRange(min=2), default=1024, show_default=True, metavar="N",
              help="Longest sequence; longer texts are cut.")  # fmt: skip
@click.option("--formats", "has_formats", is_flag=True,
              help="Also the table of candidate formats and activations, made from SOURCE.")  # fmt: skip
@click.option("--errors/--no-errors", "has_errors", default=True, help="Compare the tensors.")
@click.option("--logits/--no-logits", "has_logits", default=True, help="Compare the logits.")
@click.option("--worst", "n_worst", type=click.IntRange(min=0), default=10, show_default=True, metavar="N",
              help="List N tensors with the largest relative error.")  # fmt: skip
@click.option("--kv-dtype", type=click.Choice(KV_DTYPE.words), default=KV_DTYPE.default, show_default=True,
              help="Precision of MODEL's KV cache.")  # fmt: skip
@click.option("--threads", type=click.IntRange(1, 1024), default=1, show_default=True,
              help="Threads of each matrix product; more pay from hidden sizes of some thousand on.")  # fmt: skip
@click.option("--json", "is_json", is_flag=True, help="Machine-readable.")
def command(
    model: Path, source: Path, text_path: Path | None, ids: str | None, n_random: int | None, seed: int, n_tokens: int,
    window: int, has_formats: bool, has_errors: bool, has_logits: bool, n_worst: int, kv_dtype: str, threads: int,
    is_json: bool,
) -> None:  # fmt: skip
    """Compare the container MODEL with its SOURCE: the tensors one by one, then the logits over a text.

    Runs beside a group and needs none. Tensors are streamed: a model of any size fits, but every pass reads SOURCE whole.
    """
    if sum(given is not None for given in (text_path, ids, n_random)) > 1:
        raise click.UsageError("give one of --text, --ids and --random")
    if not (has_errors or has_logits):
        raise click.UsageError("--no-errors and --no-logits together leave nothing to do")
    # Read by numpy's linear algebra when it is first loaded; the many small products here suffer from its threads.
    for name in _THREAD_VARIABLES:
        os.environ.setdefault(name, str(threads))
    from cli.prompt import parse_ids
    from cli.quality.measure import Quality, compare_lanes, forward_units, lanes_to_run, tensor_errors
    from cli.quality.report import as_json, parts_of
    from cli.quality.tensors import Pair
    from cli.quality.text import Tokens, default_text, random_tokens, tokens_of_ids, tokens_of_text

    pair = Pair(model, source)
    try:
        tokens: Tokens | None = None
        if has_logits and n_random is not None:
            tokens = random_tokens(n_random, pair.spec.vocab, window, seed)
        elif has_logits and ids is not None:
            tokens = tokens_of_ids(parse_ids(ids), pair.spec.vocab, n_tokens, window)
        elif has_logits:
            tokens = tokens_of_text(text_path or default_text(), model, n_tokens, window)
        errors = lanes = None
        if has_errors:
            with progress("tensors", pair.n_values, is_quiet=True) as done:
                errors = tensor_errors(pair, n_worst, done)
        if tokens is not None:
            with progress("logits", forward_units(pair), is_quiet=True) as done:
                lanes = compare_lanes(pair, lanes_to_run(pair, kv_dtype, has_formats), tokens, done)
        quality = Quality(pair, errors, tokens, lanes, kv_dtype)
        if is_json:
            say_json(as_json(quality), indent=1)
        else:
            show(parts_of(quality))
    finally:
        pair.close()
