"""The control plane's decisions: plain events in, instructions out."""

from __future__ import annotations

from typing import Any

import pytest

from services.router.group import (
    IDLE_PROOF_S,
    Changed,
    Instruction,
    Kill,
    Membership,
    Note,
    Replaced,
    Reply,
    RingView,
    Sample,
    Watch,
)
from shared.awake import WAKE_GRACE_S
from shared.messages import SCHEMA_VERSION, control

SERVICES = ("gateway", "router", "attention", "expert_io", "drafter")


def identity(service: str, incarnation: int = 1) -> bytes:
    return f"{service}#{incarnation}".encode()


class Driver:
    """Feeds a group as the shell would."""

    def __init__(self, is_drafting: bool = True) -> None:
        self.group = Membership(is_drafting, heartbeat_s=1.0, stall_s=300.0)
        self.now = 100.0

    def hello(self, service: str, incarnation: int = 1, schema: int = SCHEMA_VERSION) -> list[Instruction]:
        msg = control.Hello(service, incarnation, pid_of(service, incarnation), schema)
        return self.group.heard(self.now, identity(service, incarnation), msg)

    def ready(self, service: str, incarnation: int = 1) -> list[Instruction]:
        msg = control.Ready(service, incarnation, pid_of(service, incarnation), (("kernels", "avx2"),))
        return self.group.heard(self.now, identity(service, incarnation), msg)

    def beat(self, service: str, incarnation: int = 1, stage: str = "") -> list[Instruction]:
        return self.group.heard(
            self.now, identity(service, incarnation), control.Heartbeat(service, incarnation, "ready", stage)
        )

    def all_ready(self) -> Driver:
        for service in self.group.peers:
            self.hello(service)
            self.ready(service)
        return self

    def tick(self, after_s: float, samples: dict[str, Sample] | None = None) -> list[Instruction]:
        self.now += after_s
        return self.group.tick(self.now, samples or {})


def pid_of(service: str, incarnation: int) -> int:
    return 1000 * incarnation + SERVICES.index(service)


def replies(instructions: list[Instruction], kind: type[Any]) -> dict[bytes, Any]:
    return {i.identity: i.msg for i in instructions if isinstance(i, Reply) and isinstance(i.msg, kind)}


def test_group_is_ready_when_everybody_is_whatever_the_order() -> None:
    driver = Driver()
    for service in ("drafter", "gateway", "expert_io", "attention", "router"):
        assert not driver.group.is_ready
        driver.hello(service)
        driver.ready(service)
    assert driver.group.is_ready
    assert driver.group.detail == "ready"


def test_group_waits_for_the_drafter_at_first_but_survives_without_it() -> None:
    driver = Driver()
    for service in SERVICES[:4]:
        driver.hello(service)
        driver.ready(service)
    assert not driver.group.is_ready
    driver.hello("drafter")
    driver.ready("drafter")
    assert driver.group.is_ready
    driver.group.exited("drafter", 1)
    assert driver.group.is_ready
    assert driver.group.view == RingView(1, 1, 1, 0)


def test_group_without_drafting_has_four_services() -> None:
    driver = Driver(is_drafting=False).all_ready()
    assert driver.group.is_ready
    assert len(driver.group.status(driver.now, 0, 0).services) == 4


@pytest.mark.parametrize("service", ["attention", "expert_io"])
def test_end_of_a_ring_process_is_told_at_once(service: str) -> None:
    driver = Driver().all_ready()
    out = driver.group.exited(service, 1)
    assert Changed() in out
    assert not driver.group.is_ready
    assert not driver.group.view.is_ring_alive
    assert getattr(driver.group.view, service) == 0
    assert service in driver.group.detail
    assert driver.group.exited(service, 1) == []


def test_exit_of_a_past_incarnation_means_nothing() -> None:
    driver = Driver().all_ready()
    driver.hello("attention", 2)
    driver.ready("attention", 2)
    assert driver.group.exited("attention", 1) == []
    assert driver.group.is_ready


def test_new_incarnation_is_announced_to_everybody_and_learns_everybody() -> None:
    driver = Driver().all_ready()
    driver.group.exited("attention", 1)
    out = driver.hello("attention", 2)
    assert Replaced("attention", 2) in out
    assert driver.group.view.attention == 0, "it says hello, it does not serve yet"
    assert Watch("attention", 2, pid_of("attention", 2)) in out
    told = [i for i in out if isinstance(i, Reply) and isinstance(i.msg, control.PeerChanged)]
    others = {i.identity: i.msg for i in told if i.msg.service == "attention"}
    assert set(others) == {identity("gateway"), identity("expert_io"), identity("drafter")}
    learnt = {i.msg.service for i in told if i.identity == identity("attention", 2)}
    assert learnt == {"gateway", "router", "expert_io", "drafter"}


def test_new_incarnation_without_a_seen_exit_loses_the_old_one_first() -> None:
    driver = Driver().all_ready()
    out = driver.hello("expert_io", 2)
    assert {Changed(), Replaced("expert_io", 2)} <= {i for i in out if isinstance(i, (Changed, Replaced))}
    assert not driver.group.view.is_ring_alive
    driver.ready("expert_io", 2)
    assert driver.group.view == RingView(1, 1, 2, 1)
    assert driver.group.is_ready


def test_a_gateway_counts_from_its_hello_on() -> None:
    """What its predecessor asked for has nobody to answer to, ready or not."""
    driver = Driver().all_ready()
    driver.group.exited("gateway", 1)
    assert driver.group.view.gateway == 0
    driver.hello("gateway", 2)
    assert driver.group.view.gateway == 2


def test_hello_of_an_older_incarnation_is_ignored() -> None:
    driver = Driver().all_ready()
    driver.hello("attention", 2)
    driver.ready("attention", 2)
    driver.hello("attention", 1)
    assert driver.group.peers["attention"].incarnation == 2
    assert driver.group.is_ready


def test_repeated_hello_and_ready_change_nothing() -> None:
    driver = Driver().all_ready()
    before = driver.group.view
    out = driver.hello("attention")
    assert driver.group.view == before
    assert not any(isinstance(i, (Replaced, Watch)) for i in out)
    assert driver.ready("attention") == []
    assert driver.group.is_ready


def test_new_router_asks_strangers_who_they_are() -> None:
    driver = Driver()
    driver.hello("router")
    driver.ready("router")
    assert replies(driver.beat("attention"), control.HelloWanted) == {identity("attention"): control.HelloWanted(1)}


def test_other_schema_is_told_to_stop_with_both_numbers() -> None:
    driver = Driver()
    stops = replies(driver.hello("attention", schema=SCHEMA_VERSION + 4), control.Stop)
    reason = stops[identity("attention")].reason
    assert str(SCHEMA_VERSION) in reason
    assert str(SCHEMA_VERSION + 4) in reason
    assert driver.group.peers["attention"].state == "absent"


def test_unknown_service_is_ignored() -> None:
    driver = Driver(is_drafting=False)
    driver.hello("drafter")
    assert "drafter" not in driver.group.peers


def test_silence_is_only_suspicion() -> None:
    driver = Driver().all_ready()
    driver.beat("attention", stage="layer 17")
    driver.tick(3.5)
    assert set(driver.group.suspects) == {"gateway", "attention", "expert_io", "drafter"}
    assert driver.group.is_ready
    assert "attention has not been heard of for a while (layer 17)" in driver.group.detail
    driver.beat("attention")
    assert "attention" not in driver.group.suspects


def test_busy_process_is_never_killed_before_the_limit() -> None:
    driver = Driver().all_ready()
    for n in range(280):
        out = driver.tick(1.0, {"attention": Sample("R", n), "expert_io": Sample("S", n * 7)})
        assert not [i for i in out if isinstance(i, Kill) and i.service in ("attention", "expert_io")]
    assert driver.group.is_ready


def test_stopped_process_is_killed_once() -> None:
    driver = Driver().all_ready()
    driver.tick(3.5, {})
    out = driver.tick(0.25, {"attention": Sample("T", 5)})
    kills = [i for i in out if isinstance(i, Kill)]
    assert [(k.service, k.pid) for k in kills] == [("attention", pid_of("attention", 1))]
    assert Changed() in out and driver.group.view.attention == 0
    assert not [i for i in driver.tick(0.25, {"attention": Sample("T", 5)}) if isinstance(i, Kill)]


def test_hanging_process_is_killed_after_proof_of_idleness() -> None:
    driver = Driver().all_ready()
    driver.tick(3.5)
    waited = 0.0
    while True:
        kills = [i for i in driver.tick(0.5, {"expert_io": Sample("S", 42)}) if isinstance(i, Kill)]
        waited += 0.5
        if kills:
            break
        assert waited < IDLE_PROOF_S + 2
    assert waited > IDLE_PROOF_S
    assert kills[0].service == "expert_io"


def test_process_waiting_for_a_disk_is_no_hanging_process() -> None:
    driver = Driver().all_ready()
    driver.tick(3.5)
    for _ in range(100):
        assert not [i for i in driver.tick(1.0, {"expert_io": Sample("D", 42)}) if isinstance(i, Kill)]


def test_silence_during_a_pause_of_our_own_is_nobodys_fault() -> None:
    """All were frozen; we wake first and find the others still stopped."""
    driver = Driver().all_ready()
    stopped = {service: Sample("T", 5) for service in SERVICES}
    driver.tick(70)
    driver.group.woke(driver.now)
    assert driver.group.detail == "ready"
    for _ in range(int(WAKE_GRACE_S) + 2):
        assert not [i for i in driver.tick(1, stopped) if isinstance(i, Kill)]
        assert not driver.group.suspects
    assert [i.service for i in driver.tick(2, stopped) if isinstance(i, Kill)] == [s for s in SERVICES if s != "router"]


def test_limit_holds_even_for_busy_processes() -> None:
    driver = Driver().all_ready()
    out = driver.tick(301, {"attention": Sample("R", 1)})
    assert any(isinstance(i, Kill) and i.service == "attention" and "stall_s" in i.reason for i in out)


def test_drain_asks_everybody_and_answers_when_all_are_done() -> None:
    driver = Driver().all_ready()
    out = driver.group.drain(driver.now, b"tool", "Ctrl-C", 30.0)
    assert set(replies(out, control.Drain)) == {identity(service) for service in SERVICES}
    assert not driver.group.is_ready
    assert driver.group.view == RingView(1, 1, 1, 1), "running requests must finish"
    for n, service in enumerate(SERVICES):
        out = driver.group.heard(driver.now, identity(service), control.Drained(service, n))
        assert bool(replies(out, control.Drained)) == (n == 4)
    assert replies(out, control.Drained) == {b"tool": control.Drained("group", 10)}


def test_drain_does_not_wait_for_the_dead_nor_beyond_its_deadline() -> None:
    driver = Driver().all_ready()
    driver.group.drain(driver.now, b"tool", "stop", 5.0)
    for service in ("gateway", "attention", "expert_io"):
        driver.group.heard(driver.now, identity(service), control.Drained(service))
    driver.group.exited("drafter", 1)
    assert not replies(driver.tick(5.5), control.Drained)
    assert set(replies(driver.tick(2.0), control.Drained)) == {b"tool"}


def test_who_comes_back_during_a_drain_is_told() -> None:
    driver = Driver().all_ready()
    driver.group.drain(driver.now, b"tool", "stop", 5.0)
    driver.group.exited("attention", 1)
    out = driver.hello("attention", 2)
    assert identity("attention", 2) in replies(out, control.Drain)
    driver.ready("attention", 2)
    assert not driver.group.is_ready
    assert driver.group.view == RingView(1, 2, 1, 1)


def test_last_words_end_an_incarnation_and_the_exit_adds_nothing() -> None:
    driver = Driver().all_ready()
    out = driver.group.heard(driver.now, identity("attention"), control.Dead("attention", 1, "boom", "..."))
    assert Changed() in out and driver.group.view.attention == 0
    assert driver.group.peers["attention"].state == "failed"
    assert Changed() not in driver.group.exited("attention", 1)
    driver.hello("attention", 2)
    driver.ready("attention", 2)
    assert driver.group.is_ready


def test_ready_of_a_process_that_has_ended_does_not_count() -> None:
    """Its last message may be read after the system has told of its end."""
    driver = Driver().all_ready()
    driver.group.exited("attention", 1)
    driver.hello("attention", 2)
    driver.group.exited("attention", 2)
    assert driver.ready("attention", 2) == []
    assert not driver.group.view.is_ring_alive


def test_a_message_that_no_service_may_send_is_an_error_that_says_so() -> None:
    driver = Driver().all_ready()
    [note] = driver.group.heard(driver.now, identity("attention"), control.HelloWanted(1))
    assert isinstance(note, Note) and note.level == "error" and note.fields["message"] == "HelloWanted"


# ---- the memory budget --------------------------------------------------------------------------------------------


def test_a_new_budget_goes_to_the_store_and_its_answer_to_who_asked() -> None:
    driver = Driver().all_ready()
    asked = [driver.group.change_ram(tool, control.RamWanted(size)) for tool, size in ((b"a", 7), (b"b", 0))]
    sent = [do for dos in asked for do in dos if isinstance(do, Reply)]
    assert [(do.identity, do.msg.budget_bytes) for do in sent] == [
        (identity("expert_io"), 7),
        (identity("expert_io"), 0),
    ]
    for do, tool in zip(reversed(sent), (b"b", b"a"), strict=True):
        answer = control.Ram(do.msg.asker, 100, 5, 4, 0)
        assert driver.group.heard(driver.now, identity("expert_io"), answer) == [Reply(tool, answer)]
        assert driver.group.heard(driver.now, identity("expert_io"), answer) == []


def test_a_budget_nobody_can_carry_out_is_refused() -> None:
    driver = Driver().all_ready()
    driver.group.change_ram(b"tool", control.RamWanted(7))
    lost = driver.group.exited("expert_io", 1)
    answers = [do.msg.refusal for do in lost if isinstance(do, Reply) and do.identity == b"tool"]
    assert len(answers) == 1 and "try again" in answers[0]
    (reply,) = driver.group.change_ram(b"tool", control.RamWanted(7))
    assert isinstance(reply, Reply) and reply.identity == b"tool" and "expert_io is absent" in reply.msg.refusal
