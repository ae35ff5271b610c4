"""Second stage: trains the indexers on long rows, everything else frozen.

    python train_indexer.py DATA STATE OUT_STATE [--minutes 8]

Each indexer learns to imitate attention: its scores, as a softmax over the earlier tokens, are pulled
(Kullback-Leibler) towards the attention weights averaged over all heads of all layers that use its
selection, i.e. its own and the shared layers after it.  The frozen model runs densely meanwhile.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from architecture import Attention, Fledgling, Shape
from torch import Tensor
from train import save_atomically


def attention_weights(attn: Attention, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """(mean over heads of the causal attention weights f32[B, T, T], the query latent) for the normed input h."""
    q, k, _, q_lat = attn.heads(h, cos, sin)
    n = h.shape[1]
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    mean = torch.zeros(h.shape[0], n, n)
    for head in range(q.shape[1]):
        score = (q[:, head] @ k[:, head].mT) * q.shape[-1] ** -0.5
        mean += torch.softmax(score.masked_fill(~causal, float("-inf")), -1)
    return mean / q.shape[1], q_lat


def divergence(score: Tensor, target: Tensor, first: int) -> Tensor:
    """Mean KL(target || softmax(score)) over the queries from `first` on; causal."""
    n = score.shape[-1]
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    log_p = torch.log_softmax(score.masked_fill(~causal, float("-inf")), -1).masked_fill(~causal, 0.0)
    kl = (target * (target.clamp_min(1e-9).log() - log_p)).sum(-1)
    return kl[:, first:].mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("state", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--max-steps", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--row", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(2)
    saved = torch.load(args.state, weights_only=False)
    shape = Shape(**saved["shape"])
    model = Fledgling(shape)
    model.load_state_dict(saved["model"])
    for name, p in model.named_parameters():
        p.requires_grad_("indexer" in name)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    rows = np.load(args.data / "long.npy", mmap_mode="r")
    order = np.random.default_rng(3).permutation(len(rows))
    n = args.row
    cos, sin = model.cos[:n], model.sin[:n]
    started = time.monotonic()
    n_steps = 0
    while True:
        spent = (time.monotonic() - started) / 60
        done = max(spent / args.minutes, n_steps / args.max_steps)
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (n_steps + 1) / 10, 3 * (1 - done) + 0.02)
        picked = np.sort(order[np.arange(n_steps * args.batch, (n_steps + 1) * args.batch) % len(rows)])
        ids = torch.from_numpy(rows[picked][:, : n + 1].astype(np.int64))
        losses = []
        # inputs and targets of the indexers, collected from the frozen model: (layer, h, q_lat, [weights])
        groups: list[tuple[Attention, Tensor, Tensor, list[Tensor]]] = []
        with torch.no_grad():
            x = model.embed_tokens(ids[:, :-1])
            for i, layer in enumerate(model.layers):
                h = layer.input_layernorm(x)
                weights, q_lat = attention_weights(layer.self_attn, h, cos, sin)
                if model.is_full(i):
                    groups.append((layer.self_attn, h, q_lat, [weights]))
                else:
                    groups[-1][3].append(weights)
                x, _ = layer(x, cos, sin, None)
            y = model.draft.join(model.embed_tokens(ids[:, 1:]), model.norm(x))
            h = model.draft.layer.input_layernorm(y)
            weights, q_lat = attention_weights(model.draft.layer.self_attn, h, cos, sin)
            groups.append((model.draft.layer.self_attn, h, q_lat, [weights]))
        for attn, h, q_lat, weights_of_layers in groups:
            target = torch.stack(weights_of_layers).mean(0)
            score = attn.indexer(h, q_lat, cos, sin)
            losses.append(divergence(score, target, first=64))
        torch.stack(losses).sum().backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        n_steps += 1
        if n_steps % 5 == 0:
            values = [round(v.item(), 3) for v in losses]
            print(json.dumps({"step": n_steps, "minutes": round(spent, 2), "divergence": values}), flush=True)
    saved["model"] = model.state_dict()
    saved["place"] = {**saved["place"], "indexer_steps": n_steps, "indexer_tokens": n_steps * args.batch * n}
    save_atomically(saved, args.out)


if __name__ == "__main__":
    main()
