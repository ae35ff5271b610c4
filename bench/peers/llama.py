"""One llama.cpp process (through llama-cpp-python), told what to do line by line. Runs as a script of its own: the
interpreter that has llama_cpp need not have anything of ours.

    python llama.py '{"model": PATH, "mode": "mmap", "n_threads": 2, "n_ctx": 1024, "repack": false,
                     "n_vocab": 1024, "n_batch": 512}'
    > prefill N SEED      ->  {"ns": time for N random tokens after an empty context}
    > decode N SEED       ->  {"ns": [time of each of N further tokens, one by one]}
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import random
import sys
import time
from typing import Any


class Engine:
    """A loaded model and one sequence. ``mode``: "mmap" (the file's pages) or "none" (read into private memory);
    ``repack``: into layouts of llama.cpp's own."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import llama_cpp

        self.api: Any = llama_cpp
        self.n_vocab, self.n_batch = settings["n_vocab"], settings["n_batch"]
        self.api.llama_backend_init()
        model = self.api.llama_model_default_params()
        model.load_mode = self.api.llama_load_mode_from_str(settings["mode"].encode())
        model.use_extra_bufts = settings["repack"]
        self.model = self.api.llama_model_load_from_file(settings["model"].encode(), model)
        if not self.model:
            raise SystemExit(f"llama.cpp can't load {settings['model']}")
        context = self.api.llama_context_default_params()
        context.n_ctx = settings["n_ctx"]
        context.n_batch = context.n_ubatch = self.n_batch
        context.n_threads = context.n_threads_batch = settings["n_threads"]
        self.context = self.api.llama_init_from_model(self.model, context)
        if not self.context:
            raise SystemExit("llama.cpp can't make a context")

    def prefill(self, n: int, seed: int) -> dict[str, Any]:
        """Starts anew with n random tokens; the last one's logits are computed."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        tokens = self._random(n, seed)
        begin = time.perf_counter_ns()
        for at in range(0, n, self.n_batch):
            self._decode(tokens[at : at + self.n_batch])
        return {"ns": time.perf_counter_ns() - begin}

    def decode(self, n: int, seed: int) -> dict[str, Any]:
        """n random tokens one by one, each with its logits."""
        times = []
        for token in self._random(n, seed):
            begin = time.perf_counter_ns()
            self._decode([token])
            times.append(time.perf_counter_ns() - begin)
        return {"ns": times}

    def _random(self, n: int, seed: int) -> list[int]:
        return random.Random(seed).choices(range(self.n_vocab), k=n)

    def _decode(self, tokens: list[int]) -> None:
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        status = self.api.llama_decode(self.context, self.api.llama_batch_get_one(array, len(tokens)))
        if status:
            raise SystemExit(f"llama_decode of {len(tokens)} tokens returned {status}")
        logits = self.api.llama_get_logits_ith(self.context, -1)
        if not logits or not all(map(math.isfinite, logits[: self.n_vocab : 97])):
            raise SystemExit("llama.cpp has no finite logits for the last token")


def main() -> None:
    settings = json.loads(sys.argv[1])
    # Some of llama.cpp's loaders print to standard output: answers keep it to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    begin = time.perf_counter_ns()
    engine = Engine(settings)
    system: bytes = engine.api.llama_print_system_info()
    answer: dict[str, Any] = {
        "load_ns": time.perf_counter_ns() - begin,
        "version": engine.api.__version__,
        "system": system.decode().strip(),
    }
    print(json.dumps(answer), file=answers, flush=True)
    for line in sys.stdin:
        what, n, seed = line.split()
        found = {"prefill": engine.prefill, "decode": engine.decode}[what](int(n), int(seed))
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
