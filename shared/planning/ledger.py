"""The memory ledger: every large allocation of every process, drawn from one budget before anything starts.

``make_ledger`` is pure: spec, container facts, settings and a number of bytes in; lines, slots and sizes out, or a
CapacityError with the arithmetic. ``colibri-up`` starts the group with it, ``colibri plan`` prints it: one computation.
``shared.machine.memory_probe`` asks the machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import msgspec

from native.library import default_threads
from native.memory import HUGE_PAGE
from shared.container.format import Facts
from shared.errors import CapacityError, ConfigError
from shared.memory.prompt_room import prompt_room_bytes
from shared.model.kv_layout import StatePlaces, blocks_for, kv_layout
from shared.model.spec import ModelSpec
from shared.planning.slot_share import MIB, ledger_table, share_out_slots, sized, slots_line, sum_of
from shared.planning.work_areas import attention_work_bytes, expert_scratch, gate_scratch, measured_frame_bytes
from shared.run.config import Line, Settings

BUDGET_SHARE = 0.85
"""Of what is available now; the rest is for the page cache, the desktop, and what other programs do next."""

DEFAULT_CONTEXT = 8192
DEFAULT_SEQUENCES = 4
DEFAULT_CHUNK = 512
MAX_CHUNK = 2048
"""A step of more prompt rows would keep those who decode waiting too long."""
DEFAULT_DRAFTS = 2
N_FRAMES = 2
"""One for the step, one for the draft."""

N_STAGES = 3
"""Records that are put together at a time, where they do not lie whole: one is read, one is repacked, one is between."""

SHARED = "shared"
GROUP = "group"
"""Owners that are no service: the segments, and those who start and watch the services."""

_HUGE_WASTE = 0.05
_KV_SHARE = 0.25
_WORK_SHARE = 0.10
_MIN_CONTEXT = 256
_MIN_CHUNK = 16
_TRACE_BYTES = 4 * MIB
_PROCESS_BYTES = {
    "gateway": 26 * MIB,
    "router": 30 * MIB,
    "attention": 27 * MIB,
    "expert_io": 30 * MIB,
    "drafter": 26 * MIB,
    GROUP: 59 * MIB,  # supervisor, its keeper and colibri-up
}
"""Interpreter, libraries, sockets, without what has a line of its own: the most that was measured over every way in which a
process may begin, rounded up.

Measured are proportional set sizes without named memory, after 156 answers, with CPython 3.11 on Linux x86-64. The ways: a fork
of the keeper, which shares what that had loaded (MiB: gateway 23.8, router 23.6, attention 19.9, expert_io 23.9, drafter 18.6,
group 47.2); a program of its own, where a fork would not be clean (25.9, 30.0, 27.0, 29.5, 25.6), which leaves the keeper alone
with what it loaded for the others (58.3).
"""

_PROMPT_PROCESS_BYTES = 30 * MIB
_TOKENIZER_BYTES_PER_ENTRY = 800
_SPELLING_BYTES = 200
"""The router's prompt process with its libraries. For each of 150,000 entries of byte-level BPE 740 bytes were measured in it,
and 180 in the router, which spells answers."""
_EXPERT_BYTES = 1500
"""What expert_io and its policy keep in mind about an expert and its slot: 1,060 bytes measured, 1,690 with two layouts."""
_RECORDER_BYTES = 10 * MIB
"""Records that wait for a slow disk (8 MiB), and the one being written."""
_FEW_SLOTS = 0.25
"""Of the experts: with fewer, the embedding's memory is better spent on slots. A token reads one row of it, a few kilobytes."""


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """What the group may use, and for what. The fields from ``n_slots`` on go into the group's configuration."""

    lines: tuple[Line, ...]
    available_bytes: int
    budget_bytes: int
    n_slots: int
    reserved_slots: int
    """As many have an address, so that a running group may be given more memory."""
    slot_bytes: int
    n_experts: int
    """Experts of all layers in use: with as many slots everything is resident."""
    n_threads: int
    kv_dtype: str
    prefill_chunk: int
    n_drafts: int
    max_sequences: int
    max_context: int
    n_kv_blocks: int
    n_frames: int
    logit_rows: int
    embedding_on_disk: bool = False

    @property
    def total_bytes(self) -> int:
        return sum(line.bytes for line in self.lines)

    @property
    def fixed(self) -> tuple[Line, ...]:
        """All but the slots, which are the last line."""
        return self.lines[:-1]

    @property
    def segment_bytes(self) -> int:
        """Bytes in named shared memory (/dev/shm)."""
        return sum(line.bytes for line in self.lines if line.owner == SHARED)

    def table(self) -> str:
        """The arithmetic, one line per allocation."""
        return ledger_table(self.lines, self.budget_bytes, self.available_bytes)


def make_ledger(
    spec: ModelSpec,
    facts: Facts,
    settings: Settings,
    available_bytes: int,
    shm_bytes: int | None = None,
    frame_bytes: Callable[..., int] | None = None,
    reservable_bytes: int = 0,
    chunk: int = DEFAULT_CHUNK,
    source: str = "",
) -> Ledger:
    """Shares out the memory.

    ``facts``: ``Container.facts()``. ``available_bytes``, ``shm_bytes``, ``reservable_bytes``, ``source``: ``probe_memory()``.
    ``chunk``: prompt rows per step that are worth having (``shared.planning.speed.covering_chunk``). ``frame_bytes`` replaces
    ``shared.step.frame.frame_bytes`` in tests. Raises CapacityError with the arithmetic when it does not fit, ConfigError for
    settings that can't be met by this model.
    """
    _check_settings(spec, settings)
    budget = settings.ram_bytes or int(available_bytes * BUDGET_SHARE)
    if budget > available_bytes:
        raise CapacityError(
            f"ram = {sized(budget)} is asked for, {sized(available_bytes)} are available now{source and f' ({source})'}. "
            "Give less, or end other programs."
        )
    measure = frame_bytes or measured_frame_bytes
    for n_drafts in _draft_candidates(spec, settings):
        is_last = n_drafts == _draft_candidates(spec, settings)[-1]
        try:
            given = (spec, facts, settings, available_bytes, reservable_bytes, budget, n_drafts, measure, chunk)
            ledger = _placed(settings, partial(_ledger, *given))
        except CapacityError:
            if is_last:
                raise
            continue
        if is_last or ledger.n_slots >= ledger.n_experts:
            break
    if shm_bytes is not None and ledger.segment_bytes > shm_bytes:
        raise CapacityError(
            f"Frames and KV blocks need {sized(ledger.segment_bytes)} of shared memory, /dev/shm has {sized(shm_bytes)} free. "
            "Enlarge it (docker run --shm-size, or remount with size=), or lower max_context or max_sequences.\n"
            + ledger.table()
        )
    return ledger


# ---- the computation ----------------------------------------------------------------------------------------------


def _check_settings(spec: ModelSpec, settings: Settings) -> None:
    if settings.max_context > spec.max_context:
        raise ConfigError(
            f"max_context = {settings.max_context:,}: the model was made for at most {spec.max_context:,} tokens. Give less."
        )
    if settings.max_context == 1:
        raise ConfigError("max_context = 1: at least 2 are needed (a token of the prompt and one of the answer).")
    if 0 < _asked_slots(settings) <= spec.gate_k:
        raise ConfigError(
            f"slots = {settings.slots}: at least {spec.gate_k + 1} are needed (the {spec.gate_k} experts of a "
            "token and one to read into)."
        )
    if isinstance(settings.draft, int) and settings.draft > 0 and not spec.n_mtp:
        raise ConfigError(f"draft = {settings.draft}: this model has no MTP layer that could draft. Use draft = off.")


def _asked_slots(settings: Settings) -> int:
    """A number that must be kept; 0: as many as the memory allows."""
    return settings.slots if isinstance(settings.slots, int) else 0


def _draft_candidates(spec: ModelSpec, settings: Settings) -> tuple[int, ...]:
    """Numbers of drafts to try. "auto" drafts where every expert stays in memory: elsewhere a wrong draft costs reads."""
    if not spec.n_mtp or settings.draft == "off":
        return (0,)
    if isinstance(settings.draft, int):
        return (settings.draft,)
    return (DEFAULT_DRAFTS, 0)


def _placed(settings: Settings, made: Callable[[bool], Ledger]) -> Ledger:
    """With the embedding in memory, or on disk where the model fits only so or where that brings slots and there are few.

    ``made``: the ledger with the embedding on disk, or without.
    """
    if settings.embedding != "auto":
        return made(settings.embedding == "disk")
    try:
        in_memory = made(False)
    except CapacityError:
        return made(True)
    if _asked_slots(settings) or in_memory.n_slots >= _FEW_SLOTS * in_memory.n_experts:
        return in_memory
    on_disk = made(True)
    return on_disk if on_disk.n_slots > in_memory.n_slots else in_memory


def _ledger(
    spec: ModelSpec,
    facts: Facts,
    settings: Settings,
    available: int,
    reservable_bytes: int,
    budget: int,
    n_drafts: int,
    frame_bytes: Callable[..., int],
    wanted_chunk: int,
    embedding_on_disk: bool,
) -> Ledger:
    n_threads = settings.threads or default_threads()
    n_sequences = settings.max_sequences or DEFAULT_SEQUENCES
    layers = [layer for layer in spec.moe_layers if layer < spec.n_layers or n_drafts]
    records = dict(zip(spec.moe_layers, facts.record_bytes))
    slot_bytes = _slot_bytes(max(records[layer] for layer in layers))
    n_experts = len(layers) * spec.n_experts
    asked_slots = min(_asked_slots(settings), n_experts)
    min_slots = asked_slots or min(spec.gate_k + 1, n_experts)

    fixed = [
        _dense_line(facts, embedding_on_disk),
        Line("router", f"gates of {len(spec.moe_layers)} layers", facts.gate_bytes),
        Line("expert_io", f"shared experts of {len(spec.moe_layers)} layers", facts.shared_bytes),
        Line("expert_io", f"tables of {n_experts:,} experts", n_experts * _EXPERT_BYTES + HUGE_PAGE),
        Line(SHARED, "trace and counters", _TRACE_BYTES),
    ]
    if facts.stage_bytes:
        fixed.append(Line("expert_io", "records that are put together", N_STAGES * facts.stage_bytes))
    if n_drafts:
        fixed.append(Line("drafter", "MTP layer without its experts", facts.mtp_bytes))
    if facts.has_tokenizer:
        size = spec.vocab * (_TOKENIZER_BYTES_PER_ENTRY + _SPELLING_BYTES)
        fixed.append(Line("router", "its prompt process", _PROMPT_PROCESS_BYTES))
        fixed.append(Line("router", f"tokenizer of {spec.vocab:,} entries", size))
    if settings.record_routing:
        fixed.append(Line("router", "records that wait for the disk", _RECORDER_BYTES))
    fixed += [Line(owner, "process", size) for owner, size in _PROCESS_BYTES.items() if owner != "drafter" or n_drafts]
    states, state_bytes = StatePlaces(n_sequences, n_drafts), 0
    if spec.has_states:
        state_bytes = kv_layout(spec.main_attention, settings.kv_dtype, 0, states).total_bytes
        fixed.append(Line(SHARED, f"states of {n_sequences} sequences, each twice", state_bytes))
    rest = budget - sum(line.bytes for line in fixed) - min_slots * slot_bytes

    def kv_lines(context: int, chunk: int) -> list[Line]:
        n_blocks = n_sequences * blocks_for(context)
        what = f"KV of {n_sequences} sequences x {context:,} tokens, {settings.kv_dtype}"
        places = dataclasses.replace(states, step_rows=max(chunk, 1 + n_drafts))
        size = kv_layout(spec.main_attention, settings.kv_dtype, n_blocks, places).total_bytes - state_bytes
        lines = [Line(SHARED, what, size)]
        if n_drafts:
            size = kv_layout(spec.mtp_attention, settings.kv_dtype, n_blocks, states).total_bytes
            lines.append(Line(SHARED, "KV of the MTP layer", size))
        return lines

    def work_lines(context: int, chunk: int) -> list[Line]:
        rows = chunk + n_sequences * (1 + n_drafts)
        logit_rows = rows if settings.record_logits else n_sequences * (1 + n_drafts)
        frames = N_FRAMES * frame_bytes(spec, rows, logit_rows, n_sequences, blocks_for(context))
        attention = attention_work_bytes(spec, rows, context, n_threads, settings.kv_dtype)
        # parts and shared result of all rows
        expert_io = rows * (spec.gate_k + 1) * spec.hidden * 4 + expert_scratch(spec, rows, n_threads)
        # a row's sorted probabilities
        router = spec.vocab * 16 + gate_scratch(spec, rows, n_threads)
        router += rows * spec.hidden * 4 if spec.gate.reads_residual else 0
        lines = [
            Line(SHARED, f"{N_FRAMES} frames of {rows} rows", frames),
            Line("attention", f"work area of {rows} rows", attention),
            Line("expert_io", f"results of {rows} rows x {spec.gate_k} experts", expert_io),
            Line("router", f"work area of {rows} rows", router),
        ]
        if facts.has_tokenizer:
            lines.append(Line("router", f"room for prompts of {context:,} tokens", prompt_room_bytes(context)))
        if embedding_on_disk:
            lines.append(
                Line("attention", f"{rows} rows of the embedding, all scales", rows * spec.hidden * 4 + spec.vocab * 4)
            )
        if n_drafts:
            lines.append(Line("drafter", f"work area of {rows} rows", attention))
        return lines

    context = settings.max_context or min(spec.max_context, DEFAULT_CONTEXT)
    most = settings.prefill_chunk or wanted_chunk
    while not settings.max_context and context > _MIN_CONTEXT and sum_of(kv_lines(context, most)) > rest * _KV_SHARE:
        context = max(context // 2, _MIN_CONTEXT)
    chunk = settings.prefill_chunk or min(wanted_chunk, context)
    while not settings.prefill_chunk and chunk > _MIN_CHUNK and sum_of(work_lines(context, chunk)) > rest * _WORK_SHARE:
        chunk = max(chunk // 2, _MIN_CHUNK)

    lines = [*fixed, *kv_lines(context, chunk), *work_lines(context, chunk)]
    n_slots = share_out_slots(
        lines,
        slot_bytes,
        min_slots,
        asked_slots or n_experts,
        budget,
        available,
        "Give more memory (ram), lower max_context, max_sequences or prefill_chunk, or convert to a smaller precision.",
    )
    lines.append(slots_line(n_slots, n_experts, slot_bytes))
    rows = chunk + n_sequences * (1 + n_drafts)
    return Ledger(
        lines=tuple(lines),
        available_bytes=available,
        budget_bytes=budget,
        n_slots=n_slots,
        reserved_slots=max(n_slots, min(n_experts, reservable_bytes // slot_bytes)),
        slot_bytes=slot_bytes,
        n_experts=n_experts,
        n_threads=n_threads,
        kv_dtype=settings.kv_dtype,
        prefill_chunk=chunk,
        n_drafts=n_drafts,
        max_sequences=n_sequences,
        max_context=context,
        n_kv_blocks=n_sequences * blocks_for(context),
        n_frames=N_FRAMES,
        logit_rows=rows if settings.record_logits else n_sequences * (1 + n_drafts),
        embedding_on_disk=embedding_on_disk,
    )


def _dense_line(facts: Facts, embedding_on_disk: bool) -> Line:
    """While attention starts, it reads an embedding that stays on disk once, to verify it."""
    if not embedding_on_disk:
        return Line("attention", "dense part: embedding, attention, dense layers, head", facts.dense_bytes)
    n_bytes = max(facts.dense_bytes - facts.embed_bytes, facts.embed_bytes)
    return Line("attention", "dense part: attention, dense layers, head", n_bytes)


def _slot_bytes(record: int) -> int:
    """A record rounded up to huge pages where that wastes little, else to 4096."""
    huge = -(-record // HUGE_PAGE) * HUGE_PAGE
    return huge if huge - record < _HUGE_WASTE * huge else -(-record // 4096) * 4096
