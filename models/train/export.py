"""Writes the trained model as a Hugging Face style checkpoint with the published tensor names.

    python export.py RUN/state.pt DATA/tokenizer.json OUT

OUT is built beside itself and renamed, so a reader never sees half of it.  Weights are bf16, except the
correction biases (f32), as in the published GLM-5.2 repository; the MTP layer is `model.layers.{L}`
and uses the main embedding and head.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from architecture import Shape
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

STOP_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")


def hub_tensors(state: dict[str, Tensor], shape: Shape) -> Iterator[tuple[str, Tensor]]:
    """(published name, tensor) for every weight of a state dict of `architecture.Fledgling`."""
    draft = f"model.layers.{shape.n_layers}."
    for name, tensor in state.items():
        if name == "lm_head.weight":
            yield name, tensor
            continue
        if name.startswith("draft."):
            name = draft + name.removeprefix("draft.").removeprefix("layer.")
            name = name.replace("head_norm", "shared_head.norm")
        else:
            name = "model." + name
        name = name.replace("mlp.gate_weight", "mlp.gate.weight")
        if name.endswith("mlp.correction_bias"):
            yield name.replace("correction_bias", "gate.e_score_correction_bias"), tensor
        elif ".mlp.experts_" in name:
            stem, part = name.split("experts_")
            for eid in range(tensor.shape[0]):
                yield f"{stem}experts.{eid}.{part}_proj.weight", tensor[eid]
        else:
            yield name, tensor


def make_config(shape: Shape, tokenizer: Tokenizer) -> dict[str, Any]:
    n_sparse = shape.n_layers - shape.n_dense_layers
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "eos_token_id": [tokenizer.token_to_id(token) for token in STOP_TOKENS],
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "first_k_dense_replace": shape.n_dense_layers,
        "mlp_layer_types": ["dense"] * shape.n_dense_layers + ["sparse"] * n_sparse,
        "moe_layer_freq": 1,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "vocab_size": shape.vocab_size,
        "num_hidden_layers": shape.n_layers,
        "intermediate_size": shape.dense_inner,
        "n_routed_experts": shape.n_experts,
        "num_experts_per_tok": shape.gate_k,
        "n_shared_experts": 1,
        "moe_intermediate_size": shape.expert_inner,
        "moe_router_dtype": "float32",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": shape.routed_scale,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_heads,
        "head_dim": shape.nope_dim + shape.rope_dim,
        "q_lora_rank": shape.q_rank,
        "kv_lora_rank": shape.kv_rank,
        "qk_head_dim": shape.nope_dim + shape.rope_dim,
        "qk_nope_head_dim": shape.nope_dim,
        "qk_rope_head_dim": shape.rope_dim,
        "v_head_dim": shape.v_dim,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "index_head_dim": shape.index_dim,
        "index_n_heads": shape.index_heads,
        "index_topk": shape.index_topk,
        "index_topk_pattern": None,
        "index_share_for_mtp_iteration": False,
        "indexer_rope_interleave": True,
        "indexer_types": list(shape.index_types),
        "max_position_embeddings": shape.max_positions,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": shape.eps,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def export(state_file: Path, tokenizer_file: Path, out: Path) -> None:
    saved = torch.load(state_file, weights_only=False)
    shape = Shape(**saved["shape"])
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    new = out.with_name(out.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    tensors = {}
    for name, tensor in hub_tensors(saved["model"], shape):
        kind = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        tensors[name] = tensor.to(kind).contiguous().clone()
    save_file(tensors, str(new / "model.safetensors"), metadata={"format": "pt"})
    config = make_config(shape, tokenizer)

    def write(name: str, value: dict[str, Any]) -> None:
        (new / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

    write("config.json", config)
    write(
        "generation_config.json",
        {
            "do_sample": True,
            "temperature": 0.7,
            "top_p": 0.95,
            "eos_token_id": config["eos_token_id"],
            "pad_token_id": config["pad_token_id"],
        },
    )
    template = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
    (new / "chat_template.jinja").write_text(template, encoding="utf-8")
    write(
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": shape.max_positions,
            "padding_side": "left",
            "chat_template": template,
        },
    )
    shutil.copyfile(tokenizer_file, new / "tokenizer.json")
    old = out.with_name(out.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        os.rename(out, old)
    os.rename(new, out)
    shutil.rmtree(old, ignore_errors=True)
    n_bytes = (out / "model.safetensors").stat().st_size
    print(f"{out}: {len(tensors)} tensors, {n_bytes / 1e6:.1f} MB, {saved['place']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("state", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    export(args.state, args.tokenizer, args.out)
