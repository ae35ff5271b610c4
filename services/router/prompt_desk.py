"""The router's end of the prompt process: starts it, hands it jobs, takes answers, ends it when a job takes too much.

The router's loop calls in here and never waits, except for the first start while it loads. What a process took along when it
ended is asked again of the next one (``prompt_queue`` decides). Knows neither tokenizers nor templates.
"""

from __future__ import annotations

import array
import json
import os
import queue
import select
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from services.router.prompt_frames import ANSWER, CHAT, DAMAGE, IDS, JOB, LOADED, TEXT
from services.router.prompt_queue import MAX_BYTES, MAX_CPU_S, PAUSE_S, Job, PromptQueue
from shared.awake import AwakeClock, Countdown
from shared.errors import ColibriError, ContainerError, ErrorCode, Refused
from shared.log import Log
from shared.machine.processes import TICKS_PER_S, process_line
from shared.messages.router import Submit
from shared.run.child import child_environment
from shared.run.forks import Process, start_module
from shared.wire.protocols import Polls

Outcome = list[int] | Refused
START_S: Final = 120.0
MAX_STARTS: Final = 3
"""In a row without having loaded: the process can't live here."""
STOPPED_S: Final = 2.0
"""A process that a signal has stopped for so long will not go on by itself."""
_FREE_BYTES: Final = 1 << 19
_BYTES_PER_TOKEN: Final = 64
_ENVIRONMENT: Final = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
}


def start_prompt_process(model_dir: Path, room_bytes: int) -> Process:
    """The process that reads ``model_dir``'s tokenizer and waits for jobs. Raises OSError."""
    return start_module(
        "services.router.prompt_worker",
        *(str(model_dir), str(room_bytes)),
        env=child_environment() | _ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


class PromptDesk:
    """``bus``: for ``add_fd`` and ``remove_fd``. ``done(msg, outcome)`` is called once per job, but for those dropped.

    ``begun``: the process, where it was started before there was a desk.
    """

    def __init__(
        self,
        model_dir: Path,
        room_bytes: int,
        at_most: int,
        bus: Polls,
        log: Log,
        done: Callable[[Submit, Outcome], None],
        begun: Process | None = None,
    ) -> None:
        self._begun = begun
        self._model_dir, self._room_bytes = model_dir, room_bytes
        self._at_most = at_most
        self._bus = bus
        self._log = log
        self._done = done
        self._queue = PromptQueue()
        self.turn_ends: frozenset[int] = frozenset()
        """Tokens with which the model's template begins turns. Known once it is loaded."""
        self._n_starts = 0
        self._is_overdue = False
        self._stopped_s = 0.0
        self._awake = AwakeClock(PAUSE_S)
        self._looked_at = self._awake.now()
        self._begin()

    # -- for the router

    @property
    def n_open(self) -> int:
        """Requests that wait for their prompt's tokens."""
        return self._queue.n_open

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_loaded(self) -> None:
        """Until the process has read the model's files. Raises ContainerError for damaged ones."""
        limit = Countdown(START_S)
        while not self._is_loaded:
            if limit.is_over:
                raise ColibriError(f"The prompt process did not load the tokenizer within {START_S:.0f} s.")
            if select.select([self._fd], [], [], limit.step_s)[0]:
                self._on_readable()

    def has(self, request: str) -> bool:
        return self._queue.find(request) is not None

    def submit(self, msg: Submit) -> None:
        """Raises Refused for what can't fit or is too much at once; else ``done`` will be called."""
        kind = CHAT if msg.messages_json is not None else TEXT
        text = msg.messages_json if msg.messages_json is not None else (msg.prompt or "").encode()
        kwargs = msg.template_kwargs_json or b""
        n_bytes = len(text) + len(kwargs)
        limit = _FREE_BYTES + _BYTES_PER_TOKEN * self._at_most
        param = "messages" if kind == CHAT else "prompt"
        if n_bytes > limit:
            raise Refused(
                f"The prompt has {n_bytes:,} bytes, at most {limit:,} are looked at: at most {self._at_most:,} tokens fit the "
                "context. Shorten the prompt or start with a larger --max-context.",
                code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                param=param,
            )
        if not self._queue.has_room(n_bytes):
            raise Refused(
                f"Prompts with more than {MAX_BYTES:,} bytes in all are waiting already; try again later.",
                status=429,
                code=ErrorCode.BUSY,
            )
        self._queue.submit(Job(msg.request, n_bytes, (kind, text, kwargs), msg))
        self._start_jobs()

    def drop(self, request: str) -> Submit | None:
        """The client has left: ``done`` will not be called."""
        job = self._queue.drop(request)
        return job.note if job else None

    def clear(self) -> list[Submit]:
        """Drops everything; what somebody waited for."""
        return [job.note for job in self._queue.clear()]

    def tick(self) -> None:
        """Now and then: ends the process when a job has had enough."""
        now = self._awake.now()
        dt, self._looked_at = now - self._looked_at, now
        if self._queue.running and not self._is_overdue:
            self._watch(dt)
        self._start_jobs()

    def _watch(self, dt_s: float) -> None:
        state, cpu_s = self._usage()
        self._stopped_s = self._stopped_s + dt_s if state == "T" and not self._awake.is_waking else 0.0
        if self._stopped_s > STOPPED_S:
            self._process.kill()
        elif self._queue.pass_time(dt_s, cpu_s):
            self._is_overdue = True
            self._cpu_at_end = cpu_s
            self._process.kill()

    def close(self) -> None:
        self._bus.remove_fd(self._fd)
        self._leave()

    # -- the process

    def _begin(self) -> None:
        self._n_starts += 1
        if self._n_starts > MAX_STARTS:
            raise ColibriError(
                f"The prompt process ended {MAX_STARTS} times in a row while it loaded; the router's log has its words."
            )
        self._process = self._begun or start_prompt_process(self._model_dir, self._room_bytes)
        self._begun = None
        assert self._process.stdin and self._process.stdout
        self._fd = self._process.stdout.fileno()
        os.set_blocking(self._fd, False)
        self._received = bytearray()
        self._is_loaded = False
        self._is_overdue = False
        self._cpu_at_end = 0.0
        self._stopped_s = 0.0
        # A pipe takes 64 KiB at a time; somebody has to wait for the rest.
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=_write, args=(self._process.stdin, self._outgoing), daemon=True).start()
        self._bus.add_fd(self._fd, self._on_readable)

    def _leave(self) -> None:
        self._outgoing.put(None)
        self._process.kill()
        self._process.wait()
        assert self._process.stdout
        self._process.stdout.close()

    def _usage(self) -> tuple[str, float]:
        """(state letter, seconds of processor time) of the process."""
        line = process_line(self._process.pid)
        return (line.state, line.cpu_ticks / TICKS_PER_S) if line else ("X", self._cpu_at_end)

    def _start_jobs(self) -> None:
        if self._is_overdue:
            return
        for number, job in self._queue.start(self._usage()[1]):
            kind, text, kwargs = job.work
            self._outgoing.put(JOB.pack(number, kind, self._at_most, len(text), len(kwargs)))
            self._outgoing.put(text)
            self._outgoing.put(kwargs)

    def _on_readable(self) -> None:
        try:
            part = os.read(self._fd, 1 << 20)
        except BlockingIOError:
            return
        if not part:
            self._on_end()
            return
        self._received += part
        while len(self._received) >= ANSWER.size:
            number, kind, n_bytes = ANSWER.unpack_from(self._received)
            end = ANSWER.size + n_bytes
            if len(self._received) < end:
                return
            payload = bytes(self._received[ANSWER.size : end])
            del self._received[:end]
            self._on_answer(number, kind, payload)

    def _on_answer(self, number: int, kind: int, payload: bytes) -> None:
        if kind == DAMAGE:
            raise ContainerError(payload.decode())
        self._n_starts = 0
        if number == LOADED:
            self._is_loaded = True
            self.turn_ends = frozenset(_ids(payload))
            return
        job = self._queue.finish(number)
        self._start_jobs()
        if job is None or not job.request:
            return
        if kind == IDS:
            self._done(job.note, _ids(payload))
        else:
            self._done(job.note, _refusal(json.loads(payload)))

    def _on_end(self) -> None:
        """It was killed, by us or by others, or has failed: the next one takes its jobs."""
        self._bus.remove_fd(self._fd)
        is_ours = self._is_overdue
        refused = self._queue.end(self._cpu_at_end, is_ours=is_ours)
        self._leave()
        self._log.warning(
            "prompt_process_lost",
            pid=self._process.pid,
            code=self._process.returncode,
            overdue=is_ours,
            refused=len(refused),
        )
        self._begin()
        self._start_jobs()
        for job in refused:
            if job.request:
                self._done(job.note, _too_costly(job) if is_ours else _deadly(job))


def _write(pipe: Any, outgoing: queue.SimpleQueue[bytes | None]) -> None:
    try:
        while (part := outgoing.get()) is not None:
            left = memoryview(part)
            while left:
                left = left[pipe.write(left) :]
        pipe.close()
    except OSError:  # the process is gone; who reads its answers notices
        return


def _ids(payload: bytes) -> list[int]:
    ids = array.array("I")
    ids.frombytes(payload)
    return ids.tolist()


def _refusal(told: dict[str, Any]) -> Refused:
    return Refused(told["message"], status=told["status"], code=ErrorCode(told["code"]), param=told["param"])


def _param(job: Job) -> str:
    return "messages" if job.work[0] == CHAT else "prompt"


def _too_costly(job: Job) -> Refused:
    what = "Rendering the model's chat template and tokenising" if job.work[0] == CHAT else "Tokenising"
    return Refused(
        f"{what} took more than {MAX_CPU_S:.0f} s of processor time for {job.n_bytes:,} bytes, and was given up. Send less.",
        code=ErrorCode.INVALID_VALUE,
        param=_param(job),
    )


def _deadly(job: Job) -> Refused:
    return Refused(
        f"The process that tokenises prompts ended {job.n_deaths} times at these {job.n_bytes:,} bytes: they take more memory "
        "than it may have. Send less text.",
        code=ErrorCode.INVALID_VALUE,
        param=_param(job),
    )
