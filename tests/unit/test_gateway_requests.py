"""The request table: events in, instructions out."""

from __future__ import annotations

from services.gateway.requests import Give, Limits, RequestTable, Tell
from shared.messages.gateway import GroupState, RequestAccepted, RequestDone, RequestRefused, TokenOut
from shared.messages.router import Abort, Sampling, Submit

READY = GroupState(True, "serving", "m", 100)
STARTING = GroupState(False, "attention is loading", "m", 100)


def submit(request: str = "r", router: int = 0) -> Submit:
    """As a client's request; with ``router``: as it is sent to this incarnation."""
    return Submit(request, Sampling(), prompt="x", router=router)


def ready_table(**limits: float) -> RequestTable:
    table = RequestTable(Limits(**limits))  # type: ignore[arg-type]
    assert table.hear(READY, 1, 0.0) == []
    return table


def test_a_request_runs_to_its_end() -> None:
    table = ready_table()
    assert table.begin(submit(), 0.0) == [Tell(submit(router=1))]
    accepted, out, done = RequestAccepted("r", 3, 9), TokenOut("r", 0, (5,), "a"), RequestDone("r", "stop", 3, 1)
    assert table.hear(accepted, 1, 0.1) == [Give("r", accepted)]
    assert table.hear(out, 1, 0.2) == [Give("r", out)]
    assert table.hear(done, 1, 0.3) == [Give("r", done)]
    assert not table.entries
    assert table.hear(done, 1, 0.4) == []  # exactly one final answer
    assert table.leave("r", "client_gone") == []


def test_a_new_router_goes_on_behind_the_delivered_tokens() -> None:
    table = ready_table()
    table.begin(submit(), 0.0)
    table.hear(RequestAccepted("r", 3, 9), 1, 0.1)
    table.hear(TokenOut("r", 0, (5, 6), "añ"), 1, 0.2)
    assert table.hear(STARTING, 2, 1.0) == []
    assert not table.is_ready(1.0)
    assert table.hear(TokenOut("r", 2, (7,), "late"), 1, 1.1) == [], "the dead router must not be listened to"
    assert table.hear(READY, 2, 2.0) == [Tell(Submit("r", Sampling(), prompt="x", resume_ids=(5, 6), router=2))]
    assert table.hear(TokenOut("r", 2, (7,), "late"), 1, 2.05) == [], "still dead"
    table.hear(STARTING, 1, 2.06)
    assert table.is_ready(2.07), "what the dead one says of the group is void too"
    assert table.hear(RequestAccepted("r", 3, 9), 2, 2.1) == [], "the client has been told already"
    out = TokenOut("r", 2, (7,), "c")
    assert table.hear(out, 2, 2.2) == [Give("r", out)]
    done = RequestDone("r", "length", 3, 3)
    assert table.hear(done, 2, 2.3) == [Give("r", done)]


def test_a_request_that_was_not_accepted_is_submitted_again() -> None:
    table = ready_table()
    table.begin(submit(), 0.0)
    assert table.hear(READY, 2, 1.0) == [Tell(submit(router=2))]


def test_router_changed_counts_as_a_loss_before_the_new_one_speaks() -> None:
    table = ready_table()
    table.begin(submit(), 0.0)
    assert table.router_changed(2, 0.5) == []
    assert not table.is_ready(0.5)
    assert table.hear(READY, 2, 1.0) == [Tell(submit(router=2))]


def test_a_restarted_router_that_is_not_quite_there_is_asked_again() -> None:
    table = ready_table(retry_s=0.5, grace_s=5.0)
    table.begin(submit(), 0.0)
    table.hear(RequestAccepted("r", 3, 9), 1, 0.1)
    assert len(table.hear(READY, 2, 1.0)) == 1
    assert table.hear(RequestRefused("r", 503, "not_ready", "wait"), 2, 1.1) == []
    assert table.tick(1.2) == []
    assert table.tick(1.7) == [Tell(submit(router=2))]


def test_resumes_are_bounded_and_end_with_a_named_error() -> None:
    table = ready_table(max_resumes=2)
    table.begin(submit(), 0.0)
    table.hear(RequestAccepted("r", 3, 9), 1, 0.0)
    table.hear(TokenOut("r", 0, (5,), "a"), 1, 0.0)
    for incarnation in (2, 3):
        assert len(table.hear(READY, incarnation, 1.0)) == 1
    (give,) = table.hear(READY, 4, 2.0)
    assert isinstance(give, Give)
    assert isinstance(give.event, RequestDone)
    assert (give.event.reason, give.event.error_code, give.event.n_generated) == ("error", "router_lost", 1)
    assert not table.entries


def test_nobody_waits_for_a_router_for_ever() -> None:
    table = ready_table(grace_s=10.0)
    table.begin(submit("a"), 0.0)
    table.hear(RequestAccepted("a", 3, 9), 1, 0.0)
    table.begin(submit("b"), 0.0)
    assert table.tick(9.0) == []
    codes = {
        give.event.error_code if isinstance(give.event, RequestDone) else give.event.code for give in table.tick(11.0)
    }
    assert codes == {"router_lost"}
    assert not table.entries


def test_a_silent_router_is_not_ready() -> None:
    table = ready_table(silent_s=3.0)
    assert table.is_ready(2.9)
    assert not table.is_ready(3.1)
    assert "3 s" in table.detail(3.1)
    table.hear(READY, 1, 4.0)
    assert table.is_ready(4.0)


def test_a_client_that_leaves_frees_the_router() -> None:
    table = ready_table()
    table.begin(submit(), 0.0)
    assert table.leave("r", "client_gone") == [Tell(Abort("r", "client_gone"))]
    # The router had sent a token already; it is told once a second, not for every token.
    assert table.hear(TokenOut("r", 0, (5,), "a"), 1, 0.1) == [Tell(Abort("r", "unknown"))]
    assert table.hear(TokenOut("r", 1, (5,), "a"), 1, 0.2) == []
    assert table.hear(TokenOut("r", 2, (5,), "a"), 1, 1.3) == [Tell(Abort("r", "unknown"))]


def test_a_submission_the_bus_refused_is_tried_again() -> None:
    table = ready_table(retry_s=0.5)
    table.begin(submit(), 0.0)
    table.send_failed(submit(), 0.0)
    assert table.tick(0.1) == []
    assert table.tick(0.6) == [Tell(submit(router=1))]
    table.send_failed(submit(), 0.6)
    assert table.leave("r", "client_gone") == [], "the router never heard of it"


def test_a_gap_in_the_tokens_is_an_error_not_a_shorter_text() -> None:
    table = ready_table()
    table.begin(submit(), 0.0)
    table.hear(RequestAccepted("r", 3, 9), 1, 0.0)
    table.hear(TokenOut("r", 0, (5,), "a"), 1, 0.0)
    tell, give = table.hear(TokenOut("r", 2, (7,), "c"), 1, 0.1)
    assert tell == Tell(Abort("r", "gap"))
    assert isinstance(give, Give)
    assert isinstance(give.event, RequestDone)
    assert give.event.error_code == "stream_broken"


def test_text_may_come_without_tokens() -> None:
    table = ready_table()
    table.begin(submit(), 0.0)
    table.hear(RequestAccepted("r", 3, 9), 1, 0.0)
    table.hear(TokenOut("r", 0, (5,), ""), 1, 0.0)
    out = TokenOut("r", 1, (), "held back")
    assert table.hear(out, 1, 0.1) == [Give("r", out)]


def test_refusals_reach_the_client_once() -> None:
    table = ready_table()
    table.begin(submit(), 0.0)
    refused = RequestRefused("r", 400, "context_length_exceeded", "200 > 100", "messages")
    assert table.hear(refused, 1, 0.1) == [Give("r", refused)]
    assert table.hear(READY, 2, 1.0) == []


def test_too_many_open_requests() -> None:
    table = ready_table(max_open=1)
    table.begin(submit("a"), 0.0)
    (give,) = table.begin(submit("b"), 0.0)
    assert isinstance(give, Give)
    assert isinstance(give.event, RequestRefused)
    assert give.event.status == 429
    assert list(table.entries) == ["a"]


def test_a_drain_deadline_ends_everything() -> None:
    table = ready_table()
    table.begin(submit("a"), 0.0)
    table.hear(RequestAccepted("a", 3, 9), 1, 0.0)
    table.hear(STARTING, 1, 0.0)
    table.begin(submit("b"), 0.0)
    out = table.cut_all("shutting_down", "the server stops")
    assert Tell(Abort("a", "shutting_down")) in out
    kinds = {give.request: type(give.event) for give in out if isinstance(give, Give)}
    assert kinds == {"a": RequestDone, "b": RequestRefused}
