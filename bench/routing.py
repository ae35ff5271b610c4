"""Routing traces of real conversations: the embedded model talks, ``--record-routing`` writes down what its gates choose.

    python -m bench.routing OUT.trace --seed 1 --kind mixed --at-once 1

The prompts come from the generators of the model's training text (``models/train/talk.py``) with seeds of their own; the
answers are the model's, sampled, and stand in the next turn's prompt, so routing is what a user would cause.
"""

from __future__ import annotations

import shared.run.first  # noqa: F401

# isort: split

import argparse
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shared.run.child import child_environment, python_command
from shared.run.client import Answer, Client, find_group
from shared.run.program import run_program
from shared.run.terminal import say

TRAIN = Path(__file__).parents[1] / "models" / "train"
KINDS = ("stories", "questions", "mixed")
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Spain": "Madrid", "Italy": "Rome", "Japan": "Tokyo", "China": "Beijing",
    "Egypt": "Cairo", "Norway": "Oslo", "Greece": "Athens", "Peru": "Lima", "Kenya": "Nairobi", "Canada": "Ottawa",
}  # fmt: skip
MAX_TOKENS = 160


def conversations(kind: str, seed: int, n: int) -> list[list[dict[str, Any]]]:
    """``n`` conversations: their messages as the generators wrote them, answers included (those are replaced)."""
    sys.path.insert(0, str(TRAIN))
    import talk

    rng = random.Random(f"{kind} {seed}")
    makers = {
        "stories": [talk.story_chat],
        "questions": [lambda r: talk.qa_chat(r, CAPITALS)],
        "mixed": [
            talk.story_chat,
            lambda r: talk.qa_chat(r, CAPITALS),
            talk.small_talk,
            talk.poem_chat,
            talk.json_chat,
            lambda r: talk.memory_chat(r, CAPITALS),
        ],
    }[kind]
    return [rng.choice(makers)(rng) for _ in range(n)]


def play(client: Client, messages: list[dict[str, Any]], seed: int) -> int:
    """Asks each user turn in order; returns the tokens generated."""
    history: list[dict[str, Any]] = []
    n = 0
    for message in messages:
        if message["role"] in ("system", "user"):
            history.append({"role": message["role"], "content": message["content"]})
        if message["role"] != "user":
            continue
        body: dict[str, Any] = {"messages": history, "max_tokens": MAX_TOKENS, "seed": seed + n}
        answer = Answer()
        for _ in client.stream("/v1/chat/completions", body, answer):
            pass
        n += answer.n_generated
        history.append({"role": "assistant", "content": answer.text})
    return n


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="mixed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--at-once", type=int, default=1, help="conversations at the same time")
    parser.add_argument("--draft", default="off", help="off, auto or a number of tokens")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="colibri-routing-") as base:
        run_dir = Path(base) / "run"
        up = python_command("deploy.up", "--run-dir", str(run_dir))
        start = [*up, "--port", "0", "--draft", args.draft]
        start += ["--max-sequences", str(args.at_once), "--record-routing", str(args.trace.absolute()), "--daemon"]
        subprocess.run(start, env=child_environment(), check=True)
        try:
            found = find_group(run_dir)
            assert found is not None
            client = Client(found[1])
            talks = conversations(args.kind, args.seed, args.conversations)
            with ThreadPoolExecutor(args.at_once) as pool:
                counts = list(pool.map(lambda item: play(client, item[1], 1000 * item[0]), enumerate(talks)))
            say(f"{len(talks)} conversations, {sum(counts):,} tokens generated")
        finally:
            subprocess.run([*up, "--stop"], env=child_environment(), check=False)
    return 0


if __name__ == "__main__":
    run_program("bench.routing", main)
