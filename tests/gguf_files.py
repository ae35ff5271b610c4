"""GGUF files for tests: any, byte by byte; and the oracles as llama.cpp's converter makes them.

``tests/oracles/NAME/llama.gguf_header`` is what that converter (of llama-cpp-python 0.3.36) wrote before the data: keys, names,
shapes and types are llama.cpp's own. The data are made here from the oracle's checkpoint, by what is known of the converter.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.oracle import DIRECTORY, oracle_config, oracle_dir, read_tensors

GGUF_ORACLES = tuple(sorted(path.parent.name for path in DIRECTORY.glob("*/llama.gguf_header")))
TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "BF16": 30,
         "MXFP4": 39}  # fmt: skip


class Data(NamedTuple):
    """A tensor: its type, its shape (the slowest dimension first), the bytes of its rows."""

    type: str
    shape: tuple[int, ...]
    data: bytes

    @staticmethod
    def of(values: np.ndarray, kind: str = "F32") -> Data:
        """Values as F32, F16 or, cut off, BF16."""
        values = np.ascontiguousarray(values, np.float32)
        if kind == "BF16":
            raw = (values.view(np.uint32) >> 16).astype(np.uint16)
        else:
            raw = values.astype(np.float16) if kind == "F16" else values
        return Data(kind, values.shape, raw.tobytes())


class Number(NamedTuple):
    """A value of a type that is not a Python value's usual one."""

    type: int
    code: str
    value: Any


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def typed(value: Any) -> tuple[int, bytes]:
    """(type, bytes): bool, int (u32), float (f32), str, lists of one kind."""
    if isinstance(value, Number):
        return value.type, struct.pack(f"<{value.code}", value.value)
    if isinstance(value, bool):
        return 7, bytes([value])
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, text(value)
    kinds = [typed(item) for item in value]
    return 9, struct.pack("<IQ", kinds[0][0] if kinds else 4, len(kinds)) + b"".join(raw for _, raw in kinds)


def build(metadata: Mapping[str, Any], tensors: Mapping[str, Data], align: int = 32) -> bytes:
    """A whole file of version 3."""
    keys = b"".join(text(key) + struct.pack("<I", kind) + raw for key, (kind, raw) in
                    ((key, typed(value)) for key, value in metadata.items()))  # fmt: skip
    infos, data = b"", b""
    for name, tensor in tensors.items():
        dims = tensor.shape[::-1]
        infos += text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        infos += struct.pack("<IQ", TYPES[tensor.type], len(data))
        data += tensor.data + bytes(-len(tensor.data) % align)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + keys + infos
    return head + bytes(-len(head) % align) + data


def write_oracle(name: str, path: Path) -> Path:
    """The oracle as a GGUF file, weights in bf16 (experts of gpt_oss in MXFP4), norms and small matrices in f32."""
    from gguf import GGUFReader

    header = (oracle_dir(name) / "llama.gguf_header").read_bytes()
    path.write_bytes(header + bytes(8 << 20))  # the library reads no header without its data
    found = [(t.name, t.tensor_type.name, t.shape.tolist()[::-1], t.data_offset) for t in GGUFReader(path).tensors]
    whole = bytearray(header)
    source = LlamaNames(name)
    for tensor, kind, shape, offset in found:
        if kind == "MXFP4":
            raw = source.mxfp4(tensor)
        else:
            values = source.values(tensor)
            assert list(values.shape) == shape, tensor
            raw = Data.of(values, kind).data
        whole += bytes(offset - len(whole)) + raw
    path.write_bytes(bytes(whole) + bytes(-len(whole) % 32))
    return path


class LlamaNames:
    """What llama.cpp's converter makes of a checkpoint, tensor by tensor."""

    def __init__(self, name: str) -> None:
        self.config = oracle_config(name)
        self.raw = read_tensors(oracle_dir(name))
        self.family: str = self.config["model_type"]
        self.text = self.config.get("text_config", self.config)

    def plain(self, name: str) -> np.ndarray:
        dtype, shape, data = self.raw[name]
        if dtype == "BF16":
            return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
        assert dtype == "F32"
        return np.frombuffer(data, np.float32).reshape(shape)

    def values(self, name: str) -> np.ndarray:
        prefix = "model.language_model." if self.family == "gemma4" else "model."
        top = {"token_embd.weight": prefix + "embed_tokens.weight", "output_norm.weight": prefix + "norm.weight",
               "output.weight": "lm_head.weight"}  # fmt: skip
        if name in top:
            return self.plain(top[name])
        _, layer, rest = name.split(".", 2)
        return self._below(f"{prefix}layers.{layer}.", rest)

    def _below(self, p: str, rest: str) -> np.ndarray:
        stem, _, kind = rest.rpartition(".")
        config, attn = self.text, p + "self_attn."
        if "exps" in stem:
            return self._experts(p, stem, kind)
        if stem in ("attn_k_b", "attn_v_b"):
            nope, v_dim = config["qk_nope_head_dim"], config["v_head_dim"]
            heads = self.plain(attn + "kv_b_proj.weight").reshape(config["num_attention_heads"], nope + v_dim, -1)
            return heads[:, :nope].transpose(0, 2, 1) if stem == "attn_k_b" else heads[:, nope:]
        if stem in ("attn_q", "attn_k") and self.family == "mixtral":
            rows = self.plain(f"{attn}{stem[-1]}_proj.{kind}")
            n_heads = config["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"]
            return rows.reshape(n_heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
        gate = {"mixtral": "block_sparse_moe.gate", "gpt_oss": "mlp.router", "gemma4": "router.proj"}
        names = {
            "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
            "post_attention_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm", "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm", "indexer.attn_q_b": "self_attn.indexer.wq_b",
            "indexer.attn_k": "self_attn.indexer.wk", "indexer.proj": "self_attn.indexer.weights_proj",
            "indexer.k_norm": "self_attn.indexer.k_norm", "ffn_gate_inp": gate.get(self.family, "mlp.gate"),
            "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
            "ffn_gate_shexp": "mlp.shared_experts.gate_proj", "ffn_up_shexp": "mlp.shared_experts.up_proj",
            "ffn_down_shexp": "mlp.shared_experts.down_proj", "nextn.eh_proj": "eh_proj", "nextn.enorm": "enorm",
            "nextn.hnorm": "hnorm", "nextn.embed_tokens": "embed_tokens", "nextn.shared_head_norm": "shared_head.norm",
            "nextn.shared_head_head": "shared_head.head",
        }  # fmt: skip
        if self.family == "gemma4":
            names |= {
                "ffn_norm": "pre_feedforward_layernorm", "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
                "post_ffw_norm": "post_feedforward_layernorm", "post_ffw_norm_1": "post_feedforward_layernorm_1",
                "post_ffw_norm_2": "post_feedforward_layernorm_2",
            }  # fmt: skip
        own = {
            "attn_sinks.weight": "self_attn.sinks", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
            "layer_output_scale.weight": "layer_scalar", "ffn_gate_inp.scale": "router.scale",
        }  # fmt: skip
        return self.plain(p + own.get(rest, f"{names.get(stem, '')}.{kind}"))

    def _experts(self, p: str, stem: str, kind: str) -> np.ndarray:
        part = stem.removeprefix("ffn_").removesuffix("_exps")
        if self.family == "gemma4":
            if kind == "scale":
                return self.plain(p + "router.per_expert_scale")
            return self.plain(p + f"experts.{part}_proj")
        if self.family == "gpt_oss":
            fused = self.plain(p + f"mlp.experts.{'down' if part == 'down' else 'gate_up'}_proj_bias")
            return fused[:, {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}[part]]
        where, last = "mlp.experts", f"{part}_proj"
        if self.family == "mixtral":
            where, last = "block_sparse_moe.experts", {"gate": "w1", "up": "w3", "down": "w2"}[part]
        found = []
        while (name := f"{p}{where}.{len(found)}.{last}.weight") in self.raw:
            found.append(self.plain(name))
        return np.stack(found)

    def mxfp4(self, name: str) -> bytes:
        """Blocks of 32: the exponent, then values i and i + 16 in a byte; the checkpoint has neighbours in a byte."""
        _, layer, rest = name.split(".", 2)
        part = rest.split("_")[1]
        p = f"model.layers.{layer}.mlp.experts.{'down' if part == 'down' else 'gate_up'}_proj"
        which = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}[part]
        (_, shape, blocks), (_, scale_shape, scales) = self.raw[p + "_blocks"], self.raw[p + "_scales"]
        packed = np.frombuffer(blocks, np.uint8).reshape(shape)[:, which]
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 32)
        halves = codes[..., :16] | codes[..., 16:] << 4
        exponents = np.frombuffer(scales, np.uint8).reshape(scale_shape)[:, which, :, None]
        return np.concatenate([exponents, halves], axis=-1).tobytes()


def gemma4_file() -> bytes:
    """The gemma4 oracle as llama.cpp's converter would write it; it insists on a tokenizer, which the oracle has not."""
    names = LlamaNames("gemma4")
    config = names.text
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    full_dim, n_kv = config["global_head_dim"], (config["num_global_key_value_heads"], config["num_key_value_heads"])
    n_turning = int(full_dim * config["rope_parameters"]["full_attention"]["partial_rotary_factor"]) // 2
    metadata = {
        "general.architecture": "gemma4", "gemma4.block_count": len(slides), "gemma4.context_length": 512,
        "gemma4.embedding_length": config["hidden_size"], "gemma4.feed_forward_length": config["intermediate_size"],
        "gemma4.attention.head_count": config["num_attention_heads"],
        "gemma4.attention.head_count_kv": [n_kv[is_sliding] for is_sliding in slides],
        "gemma4.attention.layer_norm_rms_epsilon": 1e-6, "gemma4.attention.key_length": full_dim,
        "gemma4.attention.value_length": full_dim, "gemma4.attention.key_length_swa": config["head_dim"],
        "gemma4.attention.value_length_swa": config["head_dim"], "gemma4.attention.sliding_window": config["sliding_window"],
        "gemma4.attention.sliding_window_pattern": slides, "gemma4.attention.shared_kv_layers": 0,
        "gemma4.embedding_length_per_layer_input": 0, "gemma4.final_logit_softcapping": config["final_logit_softcapping"],
        "gemma4.expert_count": config["num_experts"], "gemma4.expert_used_count": config["top_k_experts"],
        "gemma4.expert_feed_forward_length": config["moe_intermediate_size"], "gemma4.rope.freq_base": 1e6,
        "gemma4.rope.freq_base_swa": 1e4, "gemma4.rope.dimension_count": full_dim,
        "gemma4.rope.dimension_count_swa": config["head_dim"], "tokenizer.ggml.model": "none",
    }  # fmt: skip
    factors = np.array([1.0] * n_turning + [1e30] * (full_dim // 2 - n_turning), np.float32)
    tensors = {"rope_freqs.weight": Data.of(factors)}
    for name in ("token_embd.weight", "output_norm.weight"):
        tensors[name] = _as_bf16(names.values(name))
    vectors = ["attn_norm.weight", "post_attention_norm.weight", "ffn_norm.weight", "pre_ffw_norm_2.weight",
               "post_ffw_norm.weight", "post_ffw_norm_1.weight", "post_ffw_norm_2.weight", "layer_output_scale.weight",
               "attn_q_norm.weight", "attn_k_norm.weight", "ffn_gate_inp.scale", "ffn_down_exps.scale"]  # fmt: skip
    matrices = ["attn_q.weight", "attn_k.weight", "attn_output.weight", "ffn_gate.weight", "ffn_up.weight", "ffn_down.weight",
                "ffn_gate_inp.weight", "ffn_gate_up_exps.weight", "ffn_down_exps.weight"]  # fmt: skip
    for layer, is_sliding in enumerate(slides):
        for below in [*vectors, *matrices, *(["attn_v.weight"] if is_sliding else [])]:
            tensors[f"blk.{layer}.{below}"] = _as_bf16(names.values(f"blk.{layer}.{below}"))
    return build(metadata, tensors)


def _as_bf16(values: np.ndarray) -> Data:
    return Data.of(values, "F32" if values.ndim == 1 else "BF16")


Change = Callable[[dict[str, Any], dict[str, Data]], None]
