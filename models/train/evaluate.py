"""Measures an exported checkpoint: held-out loss, the effect of quantisation, MTP acceptance, samples.

    python evaluate.py HF DATA [--precision f32|shipped] [--samples 4]

Reads the checkpoint through the published names, so it also checks the export.  "shipped" replaces the
weights by their quantised values, as a container stores them (int4 with one f16 scale per 64 inputs for experts and
attention projections, int8 per row for embedding and head, int8 per row for the MTP layer); arithmetic
stays f32.  Generation has no cache: clear, and fast enough for a small model.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from architecture import Fledgling, Shape
from corpus import Renderer
from export import hub_tensors
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from train import evaluate

KEYS = {
    "vocab_size": "vocab_size",
    "hidden": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_dense_layers": "first_k_dense_replace",
    "dense_inner": "intermediate_size",
    "n_experts": "n_routed_experts",
    "gate_k": "num_experts_per_tok",
    "expert_inner": "moe_intermediate_size",
    "routed_scale": "routed_scaling_factor",
    "n_heads": "num_attention_heads",
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "v_dim": "v_head_dim",
    "index_heads": "index_n_heads",
    "index_dim": "index_head_dim",
    "index_topk": "index_topk",
    "eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
}


def read_shape(config: dict[str, Any]) -> Shape:
    known = {f.name for f in fields(Shape)}
    values = {ours: config[theirs] for ours, theirs in KEYS.items() if ours in known}
    return Shape(
        **values, index_types=tuple(config["indexer_types"]), rope_theta=config["rope_parameters"]["rope_theta"]
    )


def quantize_int4(weight: Tensor, group: int = 64) -> Tensor:
    """Round to 16 steps, one f16 scale per `group` inputs; the value of largest magnitude is step -8. Returns f32 values."""
    blocks = weight.float().reshape(*weight.shape[:-1], -1, group)
    highest, lowest = blocks.amax(-1, keepdim=True), blocks.amin(-1, keepdim=True)
    scale = (torch.where(-lowest >= highest, lowest, highest) / -8).half().float()
    steps = (blocks / torch.where(scale == 0, 1.0, scale)).round().clamp(-8, 7)
    return (steps * scale).reshape(weight.shape)


def quantize_int8(weight: Tensor) -> Tensor:
    scale = (weight.float().abs().amax(-1, keepdim=True) / 127).clamp_min(1e-12)
    return (weight.float() / scale).round() * scale


def ship(name: str, weight: Tensor, shape: Shape) -> Tensor:
    """The value a container gives back for the published tensor `name`."""
    if weight.ndim != 2 or name.endswith(("mlp.gate.weight", "weights_proj.weight")):
        return weight
    is_draft = name.startswith(f"model.layers.{shape.n_layers}.")
    is_byte = is_draft or name in ("model.embed_tokens.weight", "lm_head.weight")
    quantize = quantize_int8 if is_byte else quantize_int4
    if name.endswith("kv_b_proj.weight"):
        # stored as its two halves, the key half transposed: attention works in the latent space
        heads = weight.view(shape.n_heads, shape.nope_dim + shape.v_dim, shape.kv_rank)
        keys, values = heads[:, : shape.nope_dim], heads[:, shape.nope_dim :]
        return torch.cat([quantize(keys.mT.contiguous()).mT, quantize(values.contiguous())], 1).reshape(weight.shape)
    return quantize(weight)


def load_model(folder: Path, precision: str = "f32", capacity: float = 4.0) -> Fledgling:
    """The exported model with f32 arithmetic; `capacity` as in training, large enough to drop nothing."""
    shape = replace(read_shape(json.loads((folder / "config.json").read_text())), capacity=capacity)
    tensors = {k: v.float() for k, v in load_file(str(folder / "model.safetensors")).items()}
    if precision == "shipped":
        tensors = {name: ship(name, tensor, shape) for name, tensor in tensors.items()}
    model = Fledgling(shape)
    state = model.state_dict()
    # the published names point at views of our tensors, so copying into them fills the stacked experts too
    names = set()
    for name, view in hub_tensors(state, shape):
        view.copy_(tensors[name])
        names.add(name)
    if names != set(tensors):
        raise ValueError(f"unexpected tensors: {sorted(set(tensors) - names)[:5]}")
    return model.eval()


@torch.no_grad()
def generate(
    model: Fledgling, ids: list[int], stops: set[int], n: int, temperature: float = 0.0, seed: int = 0
) -> list[int]:
    """Up to `n` new ids; temperature 0 is greedy."""
    generator = torch.Generator().manual_seed(seed)
    out = list(ids)
    for _ in range(n):
        hidden, _ = model.hidden_states(torch.tensor([out]), use_indexer=True)
        logits = model.lm_head(hidden[0, -1])
        if temperature == 0:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator))
        if token in stops:
            break
        out.append(token)
    return out[len(ids) :]


@torch.no_grad()
def draft_acceptance(model: Fledgling, ids: list[int], n_prompt: int, use_indexer: bool = True) -> tuple[int, int]:
    """(accepted, offered): one draft per position of a greedy continuation ids[n_prompt:].

    The draft made from the hidden state at i and the token at i+1 is accepted if it is the token at i+2,
    which the main model chose greedily.
    """
    tokens = torch.tensor([ids])
    hidden, _ = model.hidden_states(tokens, use_indexer)
    states, _ = model.draft_states(tokens[:, 1:], hidden[:, :-1], use_indexer)
    drafts = model.lm_head(states)[0].argmax(-1)
    first = n_prompt - 1
    offered = drafts[first:-1]
    return int((offered == tokens[0, first + 2 :]).sum()), len(offered)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--precision", choices=("f32", "shipped"), default="f32")
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=16, help="held-out conversations for the MTP acceptance")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = np.load(args.data / "heldout.npy")[: args.rows]
    model = load_model(args.checkpoint, args.precision)
    main_loss, draft_loss = evaluate(model, rows)
    print(
        f"{args.precision}: held-out loss {main_loss:.4f}, MTP loss {draft_loss:.4f} ({len(rows)} rows of {rows.shape[1] - 1})"
    )
    long_rows = np.load(args.data / "heldout_long.npy")[:16]
    for use_indexer in (False, True):
        loss, draft = evaluate(model, long_rows, batch=4, use_indexer=use_indexer)
        print(
            f"{args.precision}: rows of {long_rows.shape[1] - 1}, {'indexer' if use_indexer else 'dense attention'}: loss {loss:.4f}, MTP {draft:.4f}"
        )

    # one conversation is less evenly spread over the experts than a batch
    model = load_model(args.checkpoint, args.precision, capacity=8.0)
    tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    stops = {tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|user|>", "<|observation|>")}
    render = Renderer()
    accepted = offered = 0
    with (args.data / "heldout.jsonl").open(encoding="utf-8") as file:
        conversations = [json.loads(line) for line in file]
    asked = [c[0]["content"] for c in conversations if c[0]["role"] == "user"][: args.prompts]
    for text in asked:
        ids = tokenizer.encode(render([{"role": "user", "content": text}], True), add_special_tokens=False).ids
        out = generate(model, ids, stops, 160)
        if len(out) < 3:
            continue
        hits, n = draft_acceptance(model, ids + out, len(ids))
        accepted, offered = accepted + hits, offered + n
    if offered:
        print(
            f"{args.precision}: MTP acceptance {accepted}/{offered} = {accepted / offered:.3f} (greedy, {len(asked)} held-out prompts)"
        )
    requests = [
        "Tell me a story about a small bird.",
        "What is the capital of France?",
        "Tell me a story about a brave fox and a storm.",
        "Who are you?",
        "What is 3 + 4?",
        "Write a short poem.",
    ]
    for text in requests[: args.samples]:
        ids = tokenizer.encode(render([{"role": "user", "content": text}], True), add_special_tokens=False).ids
        for temperature in (0.0, 0.7):
            out = generate(model, ids, stops, 300, temperature)
            print(f"--- {text} [temperature {temperature}]\n{tokenizer.decode(out)}")


if __name__ == "__main__":
    main()
