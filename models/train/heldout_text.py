"""Writes the text over which `colibri quality` compares logits: held-out conversations, rendered.

    python heldout_text.py DATA ../heldout.jsonl

The first 40 conversations of `heldout.jsonl` in DATA; after every fifth, the next later one of more than 500 tokens, so
that the indexer has something to choose from.  One JSON object {"text": ...} per line.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from corpus import Renderer
from tokenizers import Tokenizer

N_PLAIN, EVERY, LONG_TOKENS = 40, 5, 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
    render = Renderer()
    lines = (args.data / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [render(json.loads(line)) for line in lines]
    long_ones = (t for t in texts[N_PLAIN:] if len(tokenizer.encode(t, add_special_tokens=False).ids) > LONG_TOKENS)
    chosen = []
    for i, text in enumerate(texts[:N_PLAIN], 1):
        chosen.append(text)
        if i % EVERY == 0:
            chosen.append(next(long_ones))
    with args.out.open("w", encoding="utf-8") as file:
        for text in chosen:
            file.write(json.dumps({"text": text}) + "\n")


if __name__ == "__main__":
    main()
