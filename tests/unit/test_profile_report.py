"""Attribution of time on made-up rows whose truth is known."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest

from cli.profile.analysis import Facts, Profile, analyse, rates
from cli.profile.report import as_json, format_report, verdict
from cli.profile.storage import ReadFacts, StoreFacts, advice
from cli.profile.trace import chrome_trace
from shared.step.stages import ROW, Stage, StepKind, TraceRing, pack_found, unpack_found
from shared.wire.endpoints import ATTENTION, DRAFTER, EXPERT_IO, ROUTER, SERVICES

MS = 1_000_000


def ring_of(rows: list[tuple[Any, ...]]) -> np.ndarray:
    """(service, stage, layer, start ms, end ms[, bytes[, step]]) -> what a tool reads from the ring."""
    buf = bytearray(64 + 64 * (len(rows) + 1))
    ring = TraceRing(buf)
    for service, stage, layer, start, end, *rest in rows:
        n_bytes, step = (*rest, 0, 7)[:2] if len(rest) < 2 else rest
        one = np.zeros(1, ring.dtype)
        one["start_ns"], one["end_ns"], one["bytes"], one["step"] = int(start * MS), int(end * MS), n_bytes, step
        one["stage"], one["layer"] = stage, layer
        ring.append(SERVICES.index(service), one)
    count, out, lost = ring.read_since(0)
    assert (count, len(out), lost) == (len(rows), len(rows), 0)
    return out


def totals(report: Any, kind: str = "decode") -> dict[str, float]:
    return {total.name: total.total_ns / MS for total in report.kinds[kind].totals.values() if total.total_ns}


# One layer of one decode step: plan 1, attention 3, hop 0.5, gate 1 (beside shared 0.7), hop 0.5, experts 2, storage 4,
# reduce 0.5, hop 0.5, head 1, hop 0.5, sample 1 -> 16.0 in all, STEP says 16.2.
STEP = [
    (ROUTER, Stage.STEP, StepKind.DECODE, 100, 116.2, 1),
    (ROUTER, Stage.PLAN, -1, 100, 101),
    (ATTENTION, Stage.ATTENTION, 3, 101.5, 104.5),
    (EXPERT_IO, Stage.SHARED_FFN, 3, 105.0, 105.7),
    (ROUTER, Stage.GATE, 3, 105.0, 106.0),
    (ROUTER, Stage.PILOT, 3, 106.1, 109.0),
    (EXPERT_IO, Stage.EXPERT_FFN, 3, 106.5, 108.5),
    (EXPERT_IO, Stage.IO_WAIT, 3, 108.5, 112.5),
    (EXPERT_IO, Stage.REDUCE, 3, 112.5, 113.0),
    (EXPERT_IO, Stage.IO_READ, 3, 106.5, 110.5, 8_000_000),
    (EXPERT_IO, Stage.IO_READ, 3, 108.5, 112.5, 8_000_000),
    (ATTENTION, Stage.HEAD, -1, 113.5, 114.5),
    (ROUTER, Stage.SAMPLE, -1, 115, 116),
]


def test_each_instant_goes_to_whoever_is_waited_for() -> None:
    report = analyse(ring_of(STEP))
    assert totals(report) == pytest.approx(
        {
            "router plan": 1.0,
            "attention attention": 3.0,
            "expert_io shared_ffn": 0.7,
            "router gate": 0.3,  # only what shared_ffn does not hide
            "router pilot": 0.4,  # only until the experts begin
            "expert_io expert_ffn": 2.0,
            "expert_io io_wait": 4.0,
            "expert_io reduce": 0.5,
            "attention head": 1.0,
            "router sample": 1.0,
            "hop": 0.5 + 0.5 + 0.5 + 0.5,
            "other": 0.1,  # the router between gate and pilot
        }
    )


def test_rows_sum_to_the_wall_time_and_the_check_can_fail() -> None:
    report = analyse(ring_of(STEP))
    decode = report.kinds["decode"]
    assert decode.sum_ns == 16 * MS
    assert decode.wall_ns == 16.2 * MS
    assert decode.difference == pytest.approx(0.2 / 16.2)
    # A step whose last second has no row at all.
    rows = [(ROUTER, Stage.STEP, StepKind.DECODE, 100, 126, 1), *STEP[1:]]
    report = analyse(ring_of(rows))
    assert report.kinds["decode"].difference == pytest.approx(10 / 26)
    assert any("MORE THAN 5 %" in line for line in format_report(report))


def test_a_step_without_rows_of_the_router_begins_and_ends_with_a_hop() -> None:
    rows = [(ROUTER, Stage.STEP, StepKind.DRAFT, 0, 10, 1), (DRAFTER, Stage.DRAFT, -1, 1, 8)]
    report = analyse(ring_of(rows))
    assert totals(report, "draft") == {"drafter draft": 7, "hop": 3}
    assert report.kinds["draft"].totals["", "hop"].durations == [1 * MS, 2 * MS]
    # Where the router has the last word, what it does not name stays a difference.
    rows = [
        (ROUTER, Stage.STEP, StepKind.DECODE, 0, 10, 1),
        (ROUTER, Stage.PLAN, -1, 1, 2),
        (ROUTER, Stage.SAMPLE, -1, 6, 8),
    ]
    assert analyse(ring_of(rows)).all.difference == pytest.approx(0.3)


def test_order_of_the_rows_does_not_matter() -> None:
    assert totals(analyse(ring_of(STEP[::-1]))) == pytest.approx(totals(analyse(ring_of(STEP))))


def test_overlapping_reads_are_counted_once_as_busy() -> None:
    reads = analyse(ring_of(STEP)).reads
    assert (reads.n_reads, reads.n_bytes, reads.busy_ns) == (2, 16_000_000, 6 * MS)
    assert reads.gb_per_s == pytest.approx(16 / 6)


def test_kinds_are_apart_and_all_is_their_sum() -> None:
    rows = [
        (ROUTER, Stage.STEP, StepKind.PREFILL, 0, 10, 64),
        (ATTENTION, Stage.ATTENTION, 0, 0, 10),
        (ROUTER, Stage.STEP, StepKind.DECODE, 20, 22, 1),
        (ATTENTION, Stage.ATTENTION, 0, 20, 22),
        (ROUTER, Stage.STEP, StepKind.DRAFT, 22, 23, 1),
        (DRAFTER, Stage.DRAFT, -1, 22, 23),
    ]
    report = analyse(ring_of(rows), Facts(n_prompt=64, n_generated=7))
    assert totals(report, "prefill") == {"attention attention": 10}
    assert totals(report, "decode") == {"attention attention": 2}
    assert totals(report, "draft") == {"drafter draft": 1}
    assert report.all.sum_ns == report.all.wall_ns == 13 * MS
    assert report.between_ns == 10 * MS
    assert rates(report) == pytest.approx({"prefill_tokens_per_s": 6400, "decode_tokens_per_s": 6 / 0.003})


def test_a_row_that_reaches_over_the_end_of_a_step_is_split() -> None:
    rows = [
        (ROUTER, Stage.STEP, StepKind.DECODE, 0, 10, 1),
        (ROUTER, Stage.STEP, StepKind.DECODE, 10, 20, 1),
        (ROUTER, Stage.PILOT, 3, 8, 13),
        (ATTENTION, Stage.ATTENTION, 0, 0, 8),
        (ATTENTION, Stage.ATTENTION, 0, 13, 20),
    ]
    report = analyse(ring_of(rows))
    assert totals(report) == {"attention attention": 15, "router pilot": 5}
    assert report.kinds["decode"].totals[ROUTER, "pilot"].durations == [5 * MS]


def test_steps_that_overlap_are_not_counted_twice() -> None:
    rows = [
        (ROUTER, Stage.STEP, StepKind.DECODE, 0, 10, 1),
        (ROUTER, Stage.STEP, StepKind.DECODE, 5, 15, 1),
        (ATTENTION, Stage.ATTENTION, 0, 0, 15),
    ]
    assert analyse(ring_of(rows)).all.wall_ns == 15 * MS


def test_what_drafts_cost_and_bring() -> None:
    rows = [
        (ROUTER, Stage.STEP, StepKind.DECODE, 0, 10, 3),
        (ATTENTION, Stage.ATTENTION, 0, 0, 10),
        (ROUTER, Stage.STEP, StepKind.DRAFT, 10, 14, 1),
        (DRAFTER, Stage.DRAFT, -1, 10, 14),
    ]
    report = analyse(ring_of(rows), Facts(counters={ROUTER: {"drafts": 2, "accepted": 1}}))
    (line,) = (line for line in format_report(report) if line.startswith("drafts:"))
    assert line.endswith(
        "1 of 2 accepted (50%); drafting takes 29% of decoding: 7.0 ms a token, without drafts at most 10.0 ms"
    )
    assert verdict(report).startswith("Bottleneck: attention, dense layers and the head, 71% of decoding.")


@pytest.mark.parametrize(
    ("stage", "service", "word"),
    [
        (Stage.IO_WAIT, EXPERT_IO, "storage"),
        (Stage.EXPERT_FFN, EXPERT_IO, "computing experts"),
        (Stage.ATTENTION, ATTENTION, "attention"),
        (Stage.SAMPLE, ROUTER, "router"),
        (Stage.IO_READ, EXPERT_IO, "hops"),
    ],
)
def test_verdict_names_the_largest_share(stage: Stage, service: str, word: str) -> None:
    rows = [
        (ROUTER, Stage.STEP, StepKind.DECODE, 0, 100, 1),
        (ROUTER, Stage.PLAN, -1, 0, 5),
        (service, stage, 1, 6, 94),
        (ATTENTION, Stage.HEAD, -1, 95, 100),
    ]
    text = verdict(analyse(ring_of(rows)))
    assert word in text
    assert text.startswith("Bottleneck: ")


def test_verdict_tells_slow_hops_from_small_layers() -> None:
    def text(hop_ms: float) -> str:
        step = [(ROUTER, Stage.PLAN, -1, 0, 0.01), (ATTENTION, Stage.HEAD, -1, 0.01 + hop_ms, 0.02 + hop_ms)]
        return verdict(analyse(ring_of([(ROUTER, Stage.STEP, StepKind.DECODE, 0, 0.02 + hop_ms, 1), *step])))

    assert "(50 us each in the middle). The layers are too small" in text(0.05)
    assert "(500 us each in the middle). That is slow for a hop" in text(0.5)


def test_bytes_reconcile_with_the_kernel_or_say_so() -> None:
    counters = {EXPERT_IO: {"bytes_demand": 900, "bytes_speculative": 100, "hits": 3, "late_hits": 1, "misses": 4}}
    near = as_json(analyse(ring_of(STEP), Facts(counters=counters, kernel_read_bytes=995)))
    assert near["io"]["difference"] == pytest.approx(0.005)
    far = analyse(ring_of(STEP), Facts(counters=counters, kernel_read_bytes=0))
    assert as_json(far)["io"]["difference"] == 1.0
    assert any("page cache" in line for line in format_report(far))


def test_json_is_plain_and_complete() -> None:
    data = json.loads(json.dumps(as_json(analyse(ring_of(STEP)))))
    assert sum(row["total_s"] for row in data["rows"]) == pytest.approx(data["sum_s"]) == pytest.approx(0.016)
    assert sum(row["share"] for row in data["rows"]) == pytest.approx(1.0)
    assert sum(layer["total_s"] for layer in data["layers"]) == pytest.approx(data["sum_s"])


def test_nothing_happened() -> None:
    report = analyse(ring_of([]))
    assert "no step ran while looking" in format_report(report)
    assert as_json(report)["verdict"] == "Nothing was computed while looking."
    assert chrome_trace(ring_of([]))["traceEvents"] == []


def test_table_is_plain_ascii() -> None:
    lines = format_report(analyse(ring_of(STEP)), has_layers=True)
    assert "\n".join(lines).isascii()
    assert max(map(len, lines[:-1])) <= 120, "only the verdict is a sentence"


def test_chrome_trace_has_a_lane_per_overlapping_read() -> None:
    trace = chrome_trace(ring_of(STEP))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(STEP)
    assert min(event["ts"] for event in events) == 0
    reads = [event for event in events if event["name"] == "io_read"]
    assert len({event["tid"] for event in reads}) == 2
    for track in {(event["pid"], event["tid"]) for event in events}:
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if (e["pid"], e["tid"]) == track)
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(spans)), "rows of one track must not overlap"
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {ROUTER, ATTENTION, EXPERT_IO}


def test_row_size_is_the_one_of_the_frame() -> None:
    assert ROW.size == 40


def test_what_layers_found_is_shown_per_layer_and_counts_as_no_bytes() -> None:
    assert unpack_found(pack_found(1, 2, 3)) == (1, 2, 3)
    assert unpack_found(pack_found(1 << 19, 0, (1 << 20) - 1)) == (1 << 19, 0, (1 << 20) - 1)
    rows = [
        *STEP,
        (EXPERT_IO, Stage.UNION, 3, 106.5, 106.6, pack_found(5, 1, 2)),
        (EXPERT_IO, Stage.UNION, 3, 106.6, 106.7, pack_found(0, 0, 8)),
        (EXPERT_IO, Stage.UNION, 4, 106.7, 106.8, pack_found(7, 0, 1)),
    ]
    report = analyse(ring_of(rows))
    assert report.found == {3: (5, 1, 10), 4: (7, 0, 1)}
    assert report.all.totals[EXPERT_IO, "union"].n_bytes == 0
    [line] = [line for line in format_report(report, has_layers=True) if line.startswith("      3 ")]
    assert line.split()[-3:] == ["5", "1", "10"]
    assert as_json(report)["found"][1] == {"layer": 4, "hits": 7, "late_hits": 0, "misses": 1}
    unions = [e for e in chrome_trace(ring_of(rows))["traceEvents"] if e["name"] == "union"]
    assert unions[0]["args"] == {"step": 0, "layer": 3, "hits": 5, "late_hits": 1, "misses": 2}


def test_verdict_tells_slots_that_fill_from_slots_that_are_too_few() -> None:
    def text(evictions: int) -> str:
        counters = {EXPERT_IO: {"misses": 10, "hits": 90, "evictions": evictions}}
        return verdict(analyse(ring_of(STEP), Facts(counters=counters)))

    assert "the slots are still filling" in text(0)
    assert "More slots" in text(3)


def storage_bound(n_bytes: int, **store: Any) -> Profile:
    """Four reads within 80 of 100 ms, nearly all of it waited for."""
    rows = [
        (ROUTER, Stage.STEP, StepKind.DECODE, 0, 100, 1),
        (ROUTER, Stage.PLAN, -1, 0, 5),
        (EXPERT_IO, Stage.IO_WAIT, 1, 6, 94),
        *[(EXPERT_IO, Stage.IO_READ, 1, 10 + 20 * i, 30 + 20 * i, n_bytes) for i in range(4)],
        (ATTENTION, Stage.HEAD, -1, 95, 100),
    ]
    counters = {EXPERT_IO: {"misses": 4, "hits": 4, "evictions": 4, "bytes_demand": 4 * n_bytes, "reads": 4}}
    known = {"slot_bytes": 20 << 20, "n_experts": 1000, "n_slots": 100, **store}
    return analyse(ring_of(rows), Facts(counters=counters, store=StoreFacts(**known)))


def test_the_rate_stands_beside_the_drives() -> None:
    report = storage_bound(40_000_000, drive_bytes_s=2_500_000_000)
    [line] = [line for line in format_report(report) if line.startswith("reads:")]
    assert line.endswith("storage busy 80.0 ms (80% of the time), 2.00 GB/s, 80% of the drive's 2.50")
    reads = as_json(report)["reads"]
    assert (reads["busy_share"], reads["of_ceiling"]) == (pytest.approx(0.8), pytest.approx(0.8))
    assert "(reads ran at 2.00 GB/s, 80% of the drive's 2.50; 50% of the experts were there)" in verdict(report)
    unknown = as_json(storage_bound(40_000_000))["reads"]
    assert unknown["of_ceiling"] is None and unknown["drive_gb_per_s"] is None


@pytest.mark.parametrize(
    ("n_bytes", "store", "words"),
    [
        (
            40_000_000,
            {"drive_bytes_s": 2_500_000_000},
            "100 of 1,000 experts fit now, each further GiB of --ram holds 51",
        ),
        (40_000_000, {"drive_bytes_s": 4_000_000_000}, "something else uses it"),
        (400_000, {"drive_bytes_s": 4_000_000_000}, "More slots would help most"),
        (40_000_000, {"drive_bytes_s": 2_500_000_000, "is_buffered": True}, "through the page cache"),
        (40_000_000, {"drive_bytes_s": 2_500_000_000, "n_slots": 1000}, "a faster drive would help most"),
    ],
)
def test_verdict_on_storage_names_one_change(n_bytes: int, store: dict[str, Any], words: str) -> None:
    text = verdict(storage_bound(n_bytes, **store))
    assert words in text and text.count("would help most") == 1


def test_verdict_sends_guesses_into_an_idle_drive() -> None:
    reads = ReadFacts(4, 160_000_000, 40 * MS, 100 * MS, 4, 4)
    assert "--pilot on would help most" in advice(reads, StoreFacts(pilot="off"))
    assert "--pilot" not in advice(reads, StoreFacts(pilot="on"))
    assert "--pilot" not in advice(ReadFacts(4, 160_000_000, 90 * MS, 100 * MS, 4, 4), StoreFacts(pilot="off"))
