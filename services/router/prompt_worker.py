"""The process that renders templates and splits texts: a checkpoint's template and a client's text, out of the router's way.

``python -m services.router.prompt_worker MODEL_DIR ROOM_BYTES`` is started by ``prompt_desk``. Jobs come on stdin, answers go
to stdout, as frames; the end of stdin is the end of the process. A template is a program and a tokenizer's memory grows with
its text, so the memory that may be taken beyond what is loaded is limited.
"""

from __future__ import annotations

import shared.run.first  # noqa: F401

# isort: split

import array
import json
import os
import queue
import resource
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from native.process import return_memory_soon
from services.router.prompt_frames import ANSWER, DAMAGE, IDS, JOB, LOADED, REFUSAL, TEXT
from services.router.tokenizer import ModelTokenizer
from shared.errors import ContainerError, Refused

N_THREADS: Final = 4
NICENESS: Final = 5
"""Those who already get tokens come first."""

_TOO_LARGE: Final = json.dumps(
    {
        "message": "This prompt takes more memory than the prompt process may have. Send less, or start with a larger "
        "--max-context.",
        "status": 400,
        "code": "invalid_value",
        "param": "",
    }
).encode()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # of the whole group: the router says when this process ends
        signal.signal(number, signal.SIG_IGN)
    return_memory_soon(
        n_arenas=2, trim_bytes=1 << 20, mmap_bytes=1 << 18
    )  # what a long text took goes back to the system
    model_dir, room_bytes = Path(sys.argv[1]), int(sys.argv[2])
    answer = _Answers()
    try:
        tokenizer = ModelTokenizer(model_dir)
    except ContainerError as error:
        answer.send(LOADED, DAMAGE, str(error).encode())
        return
    os.nice(NICENESS)  # not before: until the tokenizer is there, the whole group waits for it
    jobs: queue.SimpleQueue[tuple[int, int, int, bytes, bytes]] = queue.SimpleQueue()
    for _ in range(N_THREADS):
        threading.Thread(target=_work, args=(jobs, tokenizer, answer.send), daemon=True).start()
    limit = _data_bytes() + room_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    answer.send(LOADED, IDS, array.array("I", sorted(tokenizer.turn_ends)).tobytes())
    stdin = os.fdopen(0, "rb", buffering=0)
    while head := _read(stdin, JOB.size):
        job, kind, at_most, n_text, n_kwargs = JOB.unpack(head)
        jobs.put((job, kind, at_most, _read(stdin, n_text), _read(stdin, n_kwargs)))
    os._exit(0)  # whoever asked is gone; threads may be in the middle of a text


class _Answers:
    def __init__(self) -> None:
        self._lock = threading.Lock()

    def send(self, number: int, kind: int, payload: bytes) -> None:
        left = memoryview(ANSWER.pack(number, kind, len(payload)) + payload)
        try:
            with self._lock:
                while left:
                    left = left[os.write(1, left) :]
        except OSError:
            os._exit(0)


def _work(jobs: queue.SimpleQueue[Any], tokenizer: ModelTokenizer, send: Callable[[int, int, bytes], None]) -> None:
    while True:
        job, kind, at_most, text, kwargs = jobs.get()
        try:
            ids = tokenize(tokenizer, kind, at_most, text, kwargs)
            send(job, IDS, array.array("I", ids).tobytes())
        except Refused as refusal:
            told = {"message": str(refusal), "status": refusal.status, "code": refusal.code, "param": refusal.param}
            send(job, REFUSAL, json.dumps(told).encode())
        except MemoryError:
            send(job, REFUSAL, _TOO_LARGE)
        text = kwargs = b""


def tokenize(tokenizer: ModelTokenizer, kind: int, at_most: int, text: bytes, kwargs: bytes) -> list[int]:
    """The ids of one job. Raises Refused."""
    if kind == TEXT:
        return tokenizer.encode(text.decode(), at_most)
    return tokenizer.encode_chat(json.loads(text), json.loads(kwargs) if kwargs else {}, at_most)


def _read(file: Any, n_bytes: int) -> bytes:
    """So many bytes; fewer only at the end of the stream."""
    parts = bytearray()
    while len(parts) < n_bytes and (part := file.read(n_bytes - len(parts))):
        parts += part
    return bytes(parts)


def _data_bytes() -> int:
    """What RLIMIT_DATA counts: private writable memory, touched or not."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


if __name__ == "__main__":
    main()
