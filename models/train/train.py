"""Trains the demonstration model (main model and MTP layer together); stops by the clock and resumes.

    python train.py DATA RUN [--minutes 60] [--total-minutes 56]

DATA is what `corpus.py` wrote.  RUN keeps `state.pt` (weights, optimiser, position), replaced
atomically, and `log.jsonl`.  The learning rate follows a plan over *minutes spent training*, because
on a shared machine the number of steps that fit is not known beforehand: a short rise, flat, then a
linear fall over the last part of `--total-minutes`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from architecture import Fledgling, MoE, Shape
from optimizer import Optimizer

BIAS_RATE = 6e-3  # step of the load-balancing bias per update (aux-loss-free balancing); few updates, so large steps
DRAFT_WEIGHT = 0.3


def learning_rate(minutes: float, n_steps: int, total: float, fall: float) -> float:
    """Factor of the base rates after `minutes` of a run planned for `total`; falls over the last `fall` part."""
    rise = min(1.0, (n_steps + 1) / 60)
    left = max(0.0, (total - minutes) / (total * fall))
    return rise * max(0.02, min(1.0, left))


def balance(layers: list[MoE], loads: list[torch.Tensor], rate: float) -> float:
    """Move the correction bias of over- and underloaded experts; returns the worst load over the mean."""
    worst = 0.0
    for layer, load in zip(layers, loads, strict=True):
        mean = load.mean()
        layer.correction_bias += rate * torch.sign(mean - load)
        worst = max(worst, float(load.max() / mean))
    return worst


def evaluate(model: Fledgling, rows: np.ndarray, batch: int = 16, use_indexer: bool = False) -> tuple[float, float]:
    """Mean main and draft loss over rows u16[N, T+1]."""
    sums = [0.0, 0.0]
    n_batches = 0
    with torch.no_grad():
        for i in range(0, len(rows) - batch + 1, batch):
            main, draft, _ = model.losses(torch.from_numpy(rows[i : i + batch].astype(np.int64)), use_indexer)
            sums[0] += main.item()
            sums[1] += draft.item()
            n_batches += 1
    return sums[0] / n_batches, sums[1] / n_batches


def save_atomically(value: object, path: Path) -> None:
    temporary = path.with_suffix(".new")
    torch.save(value, temporary)
    os.replace(temporary, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--minutes", type=float, default=60, help="stop this call after so many minutes")
    parser.add_argument("--total-minutes", type=float, default=56, help="the plan of the learning rate")
    parser.add_argument("--rows", default="train.npy", help="the file of DATA with the rows to train on")
    parser.add_argument("--start-from", type=Path, help="state of an earlier stage, for the first call")
    parser.add_argument("--fall", type=float, default=0.5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--matrix-lr", type=float, default=0.02)
    parser.add_argument("--vector-lr", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save-minutes", type=float, default=4)
    parser.add_argument("--draft-rows", type=int, default=4, help="rows of a batch that the MTP layer trains on")
    parser.add_argument("--question-minutes", type=float, default=20, help="the last part, with question rows mixed in")
    parser.add_argument("--question-rows", type=int, default=2, help="rows of a batch replaced by question rows")
    parser.add_argument("--compile", action="store_true", help="pays only on a quiet machine")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    args.run.mkdir(parents=True, exist_ok=True)
    rows = np.load(args.data / args.rows, mmap_mode="r")
    questions = np.load(args.data / "questions.npy")
    heldout = np.load(args.data / "heldout.npy")[:96]
    shape = Shape()
    model = Fledgling(shape)
    # indexers are trained afterwards; here attention is dense
    named = [(name, p) for name, p in model.named_parameters() if "indexer" not in name]
    for name, p in model.named_parameters():
        p.requires_grad_("indexer" not in name)
    optimizer = Optimizer(named, args.matrix_lr, args.vector_lr)
    place = {"n_rows": 0, "n_tokens": 0, "minutes": 0.0, "n_steps": 0}
    state_path = args.run / "state.pt"
    if state_path.exists():
        saved = torch.load(state_path, weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        place = saved["place"]
    elif args.start_from:
        saved = torch.load(args.start_from, weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        place = {**saved["place"], "n_rows": 0, "minutes": 0.0}
    moe_layers = [module for module in model.modules() if isinstance(module, MoE)]
    step_losses = torch.compile(model.losses, dynamic=False) if args.compile else model.losses

    def save() -> None:
        state = {
            "shape": asdict(shape),
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "place": place,
        }
        save_atomically(state, state_path)

    log = (args.run / "log.jsonl").open("a", encoding="utf-8")
    started = last = last_save = time.monotonic()
    n_epochs, order = -1, np.empty(0, np.int64)
    is_warm = False
    while (time.monotonic() - started) / 60 < args.minutes and place["minutes"] < args.total_minutes:
        epoch, first = divmod(place["n_rows"], len(rows) // args.batch * args.batch)
        if epoch != n_epochs:
            order, n_epochs = np.random.default_rng(epoch).permutation(len(rows)), epoch
        ids = torch.from_numpy(rows[np.sort(order[first : first + args.batch])].astype(np.int64))
        if place["minutes"] > args.total_minutes - args.question_minutes and args.question_rows:
            picked = np.random.default_rng(place["n_steps"]).integers(0, len(questions), args.question_rows)
            ids[-args.question_rows :] = torch.from_numpy(questions[picked].astype(np.int64))
        # the draft layer sees a part of the rows, not always the first ones
        ids = ids[torch.randperm(args.batch)]
        main, draft, loads = step_losses(ids, False, args.draft_rows)
        (main + DRAFT_WEIGHT * draft).backward()
        scale = learning_rate(place["minutes"], place["n_steps"], args.total_minutes, args.fall)
        norm = optimizer.step(scale)
        worst = balance(moe_layers, loads, BIAS_RATE * max(0.1, scale))
        now = time.monotonic()
        place["n_rows"] += args.batch
        place["n_tokens"] += ids.numel() - len(ids)
        place["n_steps"] += 1
        # compiling is not training
        place["minutes"] += (now - last) / 60 if is_warm else 0.05
        speed = (ids.numel() - len(ids)) / (now - last)
        last, is_warm = now, True
        if place["n_steps"] % 20 == 0:
            entry = {
                **place,
                "loss": main.item(),
                "draft": draft.item(),
                "scale": scale,
                "norm": norm,
                "worst_load": worst,
                "tok_s": speed,
            }
            log.write(json.dumps({k: round(v, 4) for k, v in entry.items()}) + "\n")
            log.flush()
            print(json.dumps({k: round(v, 3) for k, v in entry.items()}), flush=True)
        if now - last_save > args.save_minutes * 60:
            save()
            last = last_save = time.monotonic()
    save()
    losses = evaluate(model, heldout)
    print(json.dumps({**place, "heldout": losses[0], "heldout_draft": losses[1]}))


if __name__ == "__main__":
    main()
