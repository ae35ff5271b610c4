"""``colibri profile``: where the time of an answer goes. Reads the running group's memory without disturbing it.

Attaches read-only to the segments ``trace`` (stage rows of finished steps) and ``counters``, and compares what expert_io
says it has read with what the kernel counted for that process. The analysis itself is ``profile_report``.
"""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import click
import numpy as np

from cli.client import open_session
from cli.options import MODEL, PATH, RUN_DIR, SEED, TEMPERATURE, FiniteRange, check_writable, write_result
from cli.profile_report import Facts, Report, analyse, as_json, chrome_trace, format_report
from cli.profile_storage import StoreFacts
from cli.prompt import parse_ids, read_prompt, request_of
from shared.errors import ConfigError
from shared.memory.segments import COUNTERS, TRACE, Segment
from shared.model.config_reader import read_json
from shared.run.client import Answer, Client, ask_status, find_group
from shared.run.config import FROZEN_NAME, load_frozen
from shared.run.terminal import complain, say, say_json
from shared.step.counters import read_all
from shared.step.stages import TraceRing
from shared.wire.endpoints import EXPERT_IO

POLL_S = 0.05
SETTLE_S = 2.0
MAX_WATCH_S = 86400.0
STATES = frozenset({"slots", "resident"})
"""Counter cells that are states: shown as they are, not as differences."""


class Profiler:
    """Collects the rows of a time span. Usage: ``start``, let the group work, ``stop``. Raises ConfigError."""

    def __init__(self, run_dir: Path) -> None:
        config = load_frozen(run_dir / FROZEN_NAME)
        self._config = config
        self._segments = [Segment.attach(config.run_id, name, is_readonly=True) for name in (TRACE, COUNTERS)]
        self._ring: TraceRing | None = TraceRing(self._segments[0].buf)
        self._blocks: list[np.ndarray] = []
        self._count = 0
        self._n_lost = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._counters: dict[str, dict[str, int]] = {}
        self._io: tuple[int, int] | None = None
        self.rows: np.ndarray | None = None
        """All rows of the span, once stopped."""

    def __enter__(self) -> Profiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_thread()
        self._ring = None
        for segment in self._segments:
            segment.close()

    def start(self) -> None:
        assert self._ring is not None
        self._io = self._read_io()
        self._counters = read_all(self._segments[1].buf)
        self._count = self._ring.n_written
        self._thread = threading.Thread(target=self._collect, name="collect", daemon=True)
        self._thread.start()

    def stop(self, answer: Answer | None = None) -> Report:
        """Waits until the last step has been written down, then analyses."""
        self._settle()
        self._end_thread()
        self._take()
        after = read_all(self._segments[1].buf)
        io = self._read_io()
        facts = Facts(
            counters={
                service: {
                    name: value if name in STATES else value - self._counters.get(service, {}).get(name, 0)
                    for name, value in cells.items()
                }
                for service, cells in after.items()
            },
            store=self._store_facts(after.get(EXPERT_IO, {}).get("slots", 0)),
            n_lost=self._n_lost,
        )
        if io is not None and self._io is not None and io[0] == self._io[0]:
            facts.kernel_read_bytes = io[1] - self._io[1]
        if answer is not None:
            facts.n_prompt, facts.n_generated = answer.n_prompt, answer.n_generated
            facts.request_s, facts.first_token_s = answer.total_s, answer.first_token_s
        assert self._ring is not None
        self.rows = np.concatenate(self._blocks) if self._blocks else np.zeros(0, self._ring.dtype)
        return analyse(self.rows, facts)

    def _store_facts(self, n_slots: int) -> StoreFacts:
        config = self._config
        return StoreFacts(
            drive_bytes_s=config.drive_bytes_s,
            is_buffered=config.direct_io == "off",
            pilot=config.pilot,
            slot_bytes=config.slot_bytes,
            n_experts=config.n_experts,
            n_slots=n_slots,
        )

    def _collect(self) -> None:
        while not self._stop.wait(POLL_S):
            self._take()

    def _take(self) -> None:
        assert self._ring is not None
        self._count, rows, n_lost = self._ring.read_since(self._count)
        self._n_lost += n_lost
        if len(rows):
            self._blocks.append(rows)

    def _settle(self) -> None:
        """Returns when nothing has moved for a moment, after SETTLE_S at the latest."""
        deadline = time.monotonic() + SETTLE_S
        before: Any = None
        while time.monotonic() < deadline:
            assert self._ring is not None
            now = (self._ring.n_written, read_all(self._segments[1].buf))
            if now == before:
                return
            before = now
            time.sleep(0.15)

    def _end_thread(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _read_io(self) -> tuple[int, int] | None:
        """(pid of expert_io, bytes the kernel read from storage for it)."""
        status = ask_status(self._config)
        pid = next((service.pid for service in status.services if service.service == EXPERT_IO), 0) if status else 0
        if not pid:
            return None
        try:
            lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        except OSError:  # another user's process, or gone
            return None
        return pid, next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), 0)


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
            report = profiler.stop(answer)
            rows = profiler.rows
    if trace_path is not None and rows is not None:
        write_result(trace_path, json.dumps(chrome_trace(rows)))
    if is_json:
        say_json({**as_json(report), **({"text": answer.text} if answer else {})})
        return 0
    lines = format_report(report, has_layers=per_layer)
    if answer is not None:
        shown = ascii(answer.text) if answer.text or not answer.token_ids else f"ids {answer.token_ids[:20]} ..."
        lines = [f"answer: {shown}", answer.summary(), "", *lines]
    say("\n".join(lines))
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
