"""``colibri convert``: a checkpoint becomes a container: Hugging Face's, on the disk or at the hub, or llama.cpp's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cli.options import PATH, PATH_TEXT
from cli.show import Bars, progress
from conversion.convert import VERSION, Conversion
from conversion.gguf.kept import AS_IT_IS
from shared.container.format import DEFAULT_PRECISION, INDEX_NAME, PRECISIONS
from shared.container.reader import Container
from shared.container.recognise import is_gguf, is_hub_name
from shared.run.terminal import say

if TYPE_CHECKING:
    from conversion.fetching import FetchPlan, Listeners


@click.command("convert")
@click.argument("source", metavar="HF_DIR|FILE.gguf|hf:ORG/NAME[@REV]", type=PATH_TEXT)
@click.argument("out", metavar="OUT", type=PATH)
@click.option(
    "--precision",
    type=click.Choice([*PRECISIONS, AS_IT_IS]),
    help=f"{DEFAULT_PRECISION}, the usual one: experts and projections with one scale per 64 inputs, embedding, head and MTP "
    f"layer int8. {AS_IT_IS}, for GGUF files alone and what they get: Q8_0, Q4_0 and MXFP4 are not rounded again.",
)
@click.option(
    "--mtp/--no-mtp", "has_mtp", default=True, help="--no-mtp leaves the MTP layer out: the same text, but no drafts."
)
@click.option("--threads", type=click.IntRange(1, 64), default=2, show_default=True, help="Threads that pack experts.")
def command(source: str, out: Path, precision: str | None, has_mtp: bool, threads: int) -> None:
    """Convert a checkpoint (f32, bf16, f16 or fp8 block-128) to a container in OUT.

    HF_DIR is a directory. Of a model in several GGUF files one is given, X-00001-of-0000N.gguf. hf:ORG/NAME is fetched from the
    Hugging Face hub (HF_ENDPOINT, HF_TOKEN or a kept login) shard by shard: each is converted and deleted, so only a few lie on
    the disk at once. REV is a branch, a tag or a commit.

    Interrupted at any moment, the same command goes on where it stopped. A finished container is never overwritten.
    """
    if precision is None:
        precision = AS_IT_IS if not is_hub_name(source) and is_gguf(Path(source)) else DEFAULT_PRECISION
    if is_hub_name(source):
        _from_the_hub(source, out, precision, has_mtp, threads)
        return
    conversion = Conversion(Path(source), precision, has_mtp=has_mtp)
    _describe(conversion)
    if _is_done(conversion, out, source):
        return
    total = conversion.plan.dense_bytes + conversion.plan.expert_bytes
    with progress("converting", total) as advance:
        index = conversion.run(out, advance, threads)
    if conversion.losses is not None:
        say(f"weights: {conversion.losses.describe()}")
    say(f"wrote {out} (fingerprint {index.fingerprint})")


def _describe(conversion: Conversion) -> None:
    say(conversion.describe())
    for note in conversion.notes():
        say(f"note: {note}")


def _is_done(conversion: Conversion, out: Path, source: str) -> bool:
    """Whether ``out`` is finished already; says so."""
    if not (out / INDEX_NAME).exists() or not conversion.is_finished(out):
        return False
    say(f"{out} already is a container of this config.json in {conversion.precision}; nothing to do.")
    say(
        f"Whether it was made from these very weights: colibri verify {out} --against {source}. Changed ones need another "
        "directory."
    )
    made_by = Container.open(out).converter.version
    if made_by != VERSION:
        say(f"Converter {made_by} made it, this is {VERSION}: another directory would get other, better roundings.")
    return True


def _from_the_hub(source: str, out: Path, precision: str, has_mtp: bool, threads: int) -> None:
    from conversion.fetching import HubConversion, Listeners, begun_commit
    from conversion.hub import Hub, HubName

    name = HubName.of(source)
    begun = begun_commit(out, name)
    if begun and not name.is_commit:
        now = Hub.open(name).commit
        if now != begun:
            say(f"note: {name} has moved on since this was begun: to commit {now}. It goes on with {begun}.")
    say("asking the hub for config.json and the headers of all shards")
    with HubConversion(Hub.open(name, begun), precision, has_mtp=has_mtp) as fetched:
        conversion = fetched.conversion
        say(f"{name} is at commit {fetched.hub.commit}")
        _describe(conversion)
        if unchecked := fetched.without_checksum:
            say(
                f"note: the hub gives no checksum of {len(unchecked)} shards ({unchecked[0]}): only sizes are compared."
            )
        if _is_done(conversion, out, "HF_DIR"):
            return
        with Bars() as bars:

            def start(plan: FetchPlan, kept: int) -> Listeners:
                bars.say(
                    f"to be fetched: {plan.n_bytes:,} bytes in {len(plan.order)} shards, of which at most "
                    f"{plan.window_bytes:,} lie on the disk at once"
                )
                total = conversion.plan.dense_bytes + conversion.plan.expert_bytes
                fetching = bars.add("fetching", plan.n_bytes)
                return Listeners(
                    fetching, bars.add("converting", total, kept), lambda what: bars.say(f"fetched {what}")
                )

            index = fetched.run(out, start, threads)
    say(f"wrote {out} (fingerprint {index.fingerprint})")
