"""Averages two states of the same run: weights = (1 - share) * FIRST + share * SECOND; indexers from SECOND.

    python average.py FIRST SECOND OUT [--share 0.55]

A short stage on long rows forgets some of the short questions; halfway between the states before and
after it, the model has nearly all of both.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from train import save_atomically

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--share", type=float, default=0.55)
    args = parser.parse_args()
    first = torch.load(args.first, weights_only=False)["model"]
    saved = torch.load(args.second, weights_only=False)
    for name, tensor in saved["model"].items():
        if "indexer" not in name:
            saved["model"][name] = first[name].lerp(tensor, args.share)
    save_atomically(saved, args.out)
