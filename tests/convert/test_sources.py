"""Checkpoints in any arrangement convert alike; checkpoints that can't be right are refused with a sentence."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli.quality.tensors import Pair
from conversion.convert import Conversion
from conversion.provenance import compare_sources
from shared.container.reader import Container
from shared.errors import ConfigError, ContainerError, ShortRead
from tests.oracle import Raw, oracle_config, oracle_dir, read_tensors, write_checkpoint, write_shard

Converted = Callable[[str, str], Path]
DATA = "*.safetensors"


def same_weights(a: Path, b: Path) -> bool:
    names = sorted(path.name for path in a.glob(DATA))
    return names == sorted(path.name for path in b.glob(DATA)) and all(
        (a / name).read_bytes() == (b / name).read_bytes() for name in names
    )


def refused(directory: Path, *words: str, precision: str = "f32", error: type[Exception] = ContainerError) -> str:
    with pytest.raises(error) as caught:
        Conversion(directory, precision)
    text = str(caught.value)
    for word in words:
        assert word in text, text
    return text


@pytest.fixture
def small() -> tuple[dict[str, Any], dict[str, Raw]]:
    """The deepseek_v32 oracle as config and raw tensors."""
    return oracle_config("deepseek_v32"), read_tensors(oracle_dir("deepseek_v32"))


@pytest.mark.parametrize("name", ["glm_moe_dsa", "glm_moe_dsa_fp8"])
def test_one_expert_spread_over_shards(converted: Converted, tmp_path: Path, name: str) -> None:
    """Weights and fp8 scales of one expert in different files, dealt out in a scrambled order."""
    tensors = read_tensors(oracle_dir(name))
    names = sorted(tensors)
    np.random.default_rng(1).shuffle(names)
    shards = {f"part-{i}.safetensors": {key: tensors[key] for key in names[i::5]} for i in range(5)}
    source = write_checkpoint(tmp_path / "in", oracle_config(name), shards)
    Conversion(source, "int4").run(tmp_path / "out")
    assert same_weights(tmp_path / "out", converted(name, "int4"))


def test_f32_and_f16_checkpoints(small: Any, tmp_path: Path) -> None:
    """An f32 checkpoint keeps all bits; f16 is widened exactly."""
    config, tensors = small
    for dtype, numpy_dtype in (("F32", np.float32), ("F16", np.float16)):
        cast: dict[str, Raw] = {}
        rng = np.random.default_rng(2)
        for key, (_, shape, _) in tensors.items():
            if "embed_tokens" in key or "shared_head.head" in key:
                continue
            cast[key] = (dtype, shape, rng.standard_normal(shape).astype(numpy_dtype).tobytes())
        embed = rng.standard_normal((256, 96)).astype(numpy_dtype)
        cast["model.embed_tokens.weight"] = (dtype, (256, 96), embed.tobytes())
        source = write_checkpoint(tmp_path / dtype, config, {"model.safetensors": cast})
        Conversion(source, "f32").run(tmp_path / f"{dtype}-out")
        from shared.container.reader import aligned_buffer

        loaded = Container.open(tmp_path / f"{dtype}-out").read_dense(["model.embed_tokens.weight"], aligned_buffer)
        assert np.array_equal(loaded["model.embed_tokens.weight"].weight, embed.astype(np.float32))


def test_extra_prefix_is_recognised(converted: Converted, small: Any, tmp_path: Path) -> None:
    config, tensors = small
    renamed = {f"language_model.{key}": value for key, value in tensors.items()}
    source = write_checkpoint(tmp_path / "in", config, {"model.safetensors": renamed})
    Conversion(source, "f32").run(tmp_path / "out")
    assert same_weights(tmp_path / "out", converted("deepseek_v32", "f32"))


def test_indexer_on_shared_layers_is_ignored(converted: Converted, tmp_path: Path) -> None:
    tensors = read_tensors(oracle_dir("glm_moe_dsa"))
    for key in [key for key in tensors if key.startswith("model.layers.0.self_attn.indexer.")]:
        tensors[key.replace(".0.", ".3.", 1)] = tensors[key]
    tensors["model.layers.3.self_attn.rotary_emb.inv_freq"] = ("F32", (8,), bytes(32))
    source = write_checkpoint(tmp_path / "in", oracle_config("glm_moe_dsa"), {"model.safetensors": tensors})
    Conversion(source, "f32").run(tmp_path / "out")
    assert same_weights(tmp_path / "out", converted("glm_moe_dsa", "f32"))


def test_tied_embeddings_make_the_head(small: Any, tmp_path: Path) -> None:
    config, tensors = small
    embed = tensors["model.embed_tokens.weight"]
    tied = {
        key: value for key, value in tensors.items() if key not in ("lm_head.weight",) and "shared_head.head" not in key
    }
    source = write_checkpoint(tmp_path / "in", {**config, "tie_word_embeddings": True}, {"model.safetensors": tied})
    Conversion(source, "bf16").run(tmp_path / "out")
    from shared.container.reader import aligned_buffer
    from tests.reference.mla_moe import plain_values

    container = Container.open(tmp_path / "out")
    head = container.read_dense(["lm_head.weight"], aligned_buffer)["lm_head.weight"]
    wanted = (np.frombuffer(embed[2], np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(256, 96)
    assert np.array_equal(plain_values(head), wanted)
    tied["lm_head.weight"] = tensors["lm_head.weight"]  # not the embedding, although the config says so
    write_shard(source / "model.safetensors", tied)
    refused(source, "lm_head.weight", "differs")


def test_mtp_head_that_differs_is_refused(small: Any, tmp_path: Path) -> None:
    config, tensors = small
    dtype, shape, data = tensors["model.layers.4.shared_head.head.weight"]
    tensors["model.layers.4.shared_head.head.weight"] = (dtype, shape, b"\x01\x3f" + data[2:])
    source = write_checkpoint(tmp_path / "in", config, {"model.safetensors": tensors})
    refused(source, "model.layers.4.shared_head.head.weight", "differs", "lm_head.weight")


def test_missing_tensor(small: Any, tmp_path: Path) -> None:
    config, tensors = small
    del tensors["model.layers.2.mlp.experts.7.up_proj.weight"]
    source = write_checkpoint(tmp_path / "in", config, {"model.safetensors": tensors})
    refused(source, "model.layers.2.mlp.experts.7.up_proj.weight", "no tensor")


def test_unknown_tensor(small: Any, tmp_path: Path) -> None:
    config, tensors = small
    tensors["model.layers.1.self_attn.sinks"] = ("F32", (4,), bytes(16))
    source = write_checkpoint(tmp_path / "in", config, {"model.safetensors": tensors})
    refused(source, "model.safetensors: tensor 'model.layers.1.self_attn.sinks'", "no place")


def test_mtp_layer_that_the_config_denies(small: Any, tmp_path: Path) -> None:
    config, tensors = small
    source = write_checkpoint(tmp_path / "in", {**config, "num_nextn_predict_layers": 0}, {"m.safetensors": tensors})
    refused(source, "model.layers.4.", "no place")


def test_wrong_shape(small: Any, tmp_path: Path) -> None:
    config, tensors = small
    dtype, _, data = tensors["model.layers.1.mlp.experts.3.down_proj.weight"]
    tensors["model.layers.1.mlp.experts.3.down_proj.weight"] = (dtype, (32, 96), data)
    source = write_checkpoint(tmp_path / "in", config, {"model.safetensors": tensors})
    refused(source, "model.layers.1.mlp.experts.3.down_proj.weight", "[32, 96]", "[96, 32]")


def test_unknown_dtype(small: Any, tmp_path: Path) -> None:
    config, tensors = small
    _, shape, data = tensors["model.layers.1.mlp.experts.3.down_proj.weight"]
    tensors["model.layers.1.mlp.experts.3.down_proj.weight"] = ("I32", shape, data * 2)
    source = write_checkpoint(tmp_path / "in", config, {"model.safetensors": tensors})
    refused(source, "I32", "experts.3.down_proj")
    tensors["model.layers.1.mlp.experts.3.down_proj.weight"] = ("U8", (96, 16), bytes(96 * 16))  # two in a byte
    write_shard(source / "model.safetensors", tensors)
    refused(source, "U8", "experts.3.down_proj", "bf16 repository")


def test_fp8_without_its_scale(tmp_path: Path) -> None:
    tensors = read_tensors(oracle_dir("glm_moe_dsa_fp8"))
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"
    scale = tensors.pop(name)
    source = write_checkpoint(tmp_path / "in", oracle_config("glm_moe_dsa_fp8"), {"model.safetensors": tensors})
    refused(source, name, "F8_E4M3")
    tensors[name] = ("F32", (1, 2), scale[2][:8])  # a block missing: sizes are not guessed from ratios
    write_shard(source / "model.safetensors", tensors)
    refused(source, name, "[2, 2]", "[1, 2]")


def test_bf16_with_a_scale_is_contradictory(small: Any, tmp_path: Path) -> None:
    config, tensors = small
    tensors["model.layers.0.mlp.down_proj.weight_scale_inv"] = ("F32", (1, 1), bytes(4))
    source = write_checkpoint(tmp_path / "in", config, {"model.safetensors": tensors})
    refused(source, "model.layers.0.mlp.down_proj.weight_scale_inv")


@pytest.mark.parametrize("precision", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize(
    "victim", ["model.layers.1.mlp.experts.3.down_proj.weight", "model.embed_tokens.weight", "model.norm.weight"]
)
def test_weights_that_are_not_finite(small: Any, tmp_path: Path, precision: str, victim: str) -> None:
    config, tensors = small
    dtype, shape, data = tensors[victim]
    tensors[victim] = (dtype, shape, b"\xc0\x7f" + data[2:])
    if "embed" in victim:
        tensors.pop("model.layers.4.embed_tokens.weight")
    source = write_checkpoint(tmp_path / "in", config, {"model.safetensors": tensors})
    with pytest.raises(ContainerError, match="NaN") as caught:
        Conversion(source, precision).run(tmp_path / "out")
    assert victim in str(caught.value)
    assert not (tmp_path / "out" / "colibri.json").exists()


# ---- files --------------------------------------------------------------------------------------------------------


def copy_oracle(tmp_path: Path) -> Path:
    """A writable copy of the three-shard oracle, without the arrays."""
    target = tmp_path / "in"
    target.mkdir()
    for path in oracle_dir("glm_moe_dsa").glob("*"):
        if path.suffix in (".json", ".safetensors"):
            (target / path.name).write_bytes(path.read_bytes())
    return target


def test_missing_shard(tmp_path: Path) -> None:
    source = copy_oracle(tmp_path)
    (source / "model-00002-of-00003.safetensors").unlink()
    refused(source, "model-00002-of-00003.safetensors", "missing")


def test_truncated_shard(tmp_path: Path) -> None:
    source = copy_oracle(tmp_path)
    shard = source / "model-00003-of-00003.safetensors"
    size = shard.stat().st_size
    for keep in (size - 1, size // 2, 200, 8, 3, 0):
        with open(shard, "r+b") as file:
            file.truncate(keep)
        refused(source, "model-00003-of-00003.safetensors", "truncated")


def test_header_that_is_nonsense(tmp_path: Path) -> None:
    source = copy_oracle(tmp_path)
    shard = source / "model-00001-of-00003.safetensors"
    original = shard.read_bytes()
    length = int.from_bytes(original[:8], "little")
    bad_json = original[:8] + b"[" + original[9:]
    header = json.loads(original[8 : 8 + length])
    for name, change in (
        ("dtype", lambda e: e.pop("dtype")),
        ("offsets", lambda e: e.update(data_offsets=[5, -3])),
        ("shape", lambda e: e.update(shape=[1 << 40, 1 << 40])),
        ("types", lambda e: e.update(data_offsets="ab")),
        ("text", lambda e: e.update(shape=["x"])),
    ):
        changed = json.loads(json.dumps(header))
        change(changed["model.norm.weight"])
        text = json.dumps(changed).encode()
        shard.write_bytes(len(text).to_bytes(8, "little") + text + original[8 + length :])
        refused(source, "model-00001-of-00003.safetensors", "model.norm.weight")
        assert name
    shard.write_bytes(bad_json)
    refused(source, "model-00001-of-00003.safetensors", "JSON")
    shard.write_bytes(b"\xff" * 8 + original[8:])
    refused(source, "model-00001-of-00003.safetensors", "truncated")


def test_index_that_leads_outside(tmp_path: Path) -> None:
    source = copy_oracle(tmp_path)
    index = source / "model.safetensors.index.json"
    loaded = json.loads(index.read_text())
    loaded["weight_map"]["model.norm.weight"] = "../../etc/passwd"
    index.write_text(json.dumps(loaded))
    refused(source, "../../etc/passwd", "same directory")
    index.write_text("{}")
    refused(source, "weight_map")
    index.write_text("nonsense")
    refused(source, "malformed")


def test_index_that_promises_too_much(tmp_path: Path) -> None:
    source = copy_oracle(tmp_path)
    index = source / "model.safetensors.index.json"
    loaded = json.loads(index.read_text())
    loaded["weight_map"]["model.layers.99.extra"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(loaded))
    refused(source, "model.layers.99.extra")


def test_tensor_in_two_files(small: Any, tmp_path: Path) -> None:
    config, tensors = small
    source = write_checkpoint(tmp_path / "in", config, {"a.safetensors": tensors})
    write_shard(source / "b.safetensors", {"model.norm.weight": tensors["model.norm.weight"]})
    refused(source, "model.norm.weight", "a.safetensors", "b.safetensors")


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    refused(tmp_path, "config.json")
    refused(tmp_path / "nowhere", "config.json", "does not exist")
    (tmp_path / "config.json").write_text(json.dumps(oracle_config("glm_moe_dsa")))
    refused(tmp_path, "safetensors")


def test_unknown_family_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    source = copy_oracle(tmp_path)
    config = oracle_config("glm_moe_dsa")
    (source / "config.json").write_text(json.dumps({**config, "model_type": "gpt_neo"}))
    refused(source, "gpt_neo", "glm_moe_dsa", error=ConfigError)


def test_container_is_no_checkpoint(converted: Converted) -> None:
    refused(converted("glm_moe_dsa", "f32"), "already a container")


def test_shard_that_vanishes_or_shrinks_while_converting(tmp_path: Path) -> None:
    """The complaint is about the source, not about the output; with the shard back the same command goes on."""
    source = copy_oracle(tmp_path)
    conversion = Conversion(source, "int4")
    shard = source / "model-00003-of-00003.safetensors"
    data = shard.read_bytes()
    shard.unlink()
    with pytest.raises(ContainerError, match=r"model-00003-of-00003\.safetensors: tensor .* can't be read"):
        conversion.run(tmp_path / "out")
    shard.write_bytes(data)
    conversion = Conversion(source, "int4")
    with open(shard, "r+b") as file:
        file.truncate(len(data) - 1000)
    with pytest.raises(ContainerError, match=r"model-00003-of-00003.*tensor .* has changed"):
        conversion.run(tmp_path / "out")
    shard.write_bytes(data)
    conversion = Conversion(source, "int4")
    name = next(n for n, t in conversion.checkpoint.tensors.items() if t.file == shard.name and len(t.entry.shape) == 2)
    conversion.checkpoint.rows(name)  # the file is open now
    with open(shard, "r+b") as file:
        file.truncate(1000)
    with pytest.raises(ShortRead, match="model-00003-of-00003"):
        conversion.checkpoint.rows(name)
    shard.write_bytes(data)
    Conversion(source, "int4").run(tmp_path / "out")


# ---- indices, layouts, what else lies there ------------------------------------------------------------------------


def change_weight_map(source: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = source / "model.safetensors.index.json"
    loaded = json.loads(index.read_text())
    change(loaded["weight_map"])
    index.write_text(json.dumps(loaded))


def test_tensor_in_two_shards_of_an_index(tmp_path: Path) -> None:
    """The index names one of them; the other may be the right one."""
    source = copy_oracle(tmp_path)
    tensors = read_tensors(source)
    shards = sorted(path.name for path in source.glob(DATA))
    weight_map = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    name = next(name for name, file in weight_map.items() if file == shards[0])
    second = {n: tensors[n] for n, file in weight_map.items() if file == shards[1]} | {name: tensors[name]}
    write_shard(source / shards[1], second)
    refused(source, repr(name), shards[0], shards[1])


def test_index_that_leads_to_the_wrong_shard(tmp_path: Path) -> None:
    source = copy_oracle(tmp_path)
    name = "model.norm.weight"

    def mislead(weight_map: dict[str, str]) -> None:
        weight_map[name] = next(file for file in weight_map.values() if file != weight_map[name])

    change_weight_map(source, mislead)
    refused(source, name, "but it is in")
    change_weight_map(source, lambda m: m.update({name: "model-00001-of-00003.safetensors"}))
    change_weight_map(source, lambda m: m.update({"extra": "model-00009-of-00003.safetensors"}))
    refused(source, "model-00009-of-00003.safetensors is missing (it should hold 'extra')")
    text = (source / "model.safetensors.index.json").read_text()
    twice = text.replace('"weight_map": {', '"weight_map": {"model.norm.weight": "model-00001-of-00003.safetensors", ')
    (source / "model.safetensors.index.json").write_text(twice)
    refused(source, name, "twice")


def test_a_missing_shard_is_seen_without_an_index(tmp_path: Path) -> None:
    source = copy_oracle(tmp_path)
    (source / "model.safetensors.index.json").unlink()
    Conversion(source, "int4")
    for number in (3, 2):
        (source / f"model-{number:05d}-of-00003.safetensors").unlink()
        refused(source, f"model-{number:05d}-of-00003.safetensors is missing" if number == 3 else "is missing")


def test_files_of_others_are_no_shards(converted: Converted, tmp_path: Path) -> None:
    source = copy_oracle(tmp_path)
    (source / "model.safetensors.index.json").unlink()
    for name in ("._model-00001-of-00003.safetensors", ".DS_Store", "._config.json"):
        (source / name).write_bytes(b"\0\5\26\7 other program")
    (source / "lost+found").mkdir()
    out = tmp_path / "out"
    (out / "lost+found").mkdir(parents=True)
    (out / ".DS_Store").write_bytes(b"")
    Conversion(source, "int4").run(out)
    assert same_weights(out, converted("glm_moe_dsa", "int4"))


EXPERT = "model.layers.1.mlp.experts.3.down_proj"
Parts = dict[str, tuple[str, tuple[int, ...]]]
LAYOUTS: dict[str, tuple[str, Parts, tuple[str, ...]]] = {
    "NVFP4": (
        f"{EXPERT}.",
        {"weight_packed": ("U8", (96, 16)), "weight_scale": ("F8_E4M3", (96, 2)), "weight_global_scale": ("F32", (1,))},
        ("NVFP4",),
    ),
    "int8 per row": (f"{EXPERT}.", {"weight": ("I8", (96, 32)), "weight_scale": ("F32", (96,))}, ("per row", "I8")),
    "bitsandbytes": (
        f"{EXPERT}.",
        {"weight": ("U8", (1536, 1)), "weight.absmax": ("U8", (48,)), "weight.quant_map": ("F32", (16,))},
        ("bitsandbytes",),
    ),
    "MXFP4": (
        "model.layers.1.mlp.experts.",
        {"gate_up_proj_blocks": ("U8", (8, 64, 3, 16)), "gate_up_proj_scales": ("U8", (8, 64, 3))},
        ("MXFP4",),
    ),
    "fp8 in blocks of 32": (
        f"{EXPERT}.",
        {"weight": ("F8_E4M3", (96, 32)), "weight_scale_inv": ("F32", (3, 1))},
        ("[3, 1]", "128 x 128", "bf16 repository"),
    ),
    "fp8 with another scale": (
        f"{EXPERT}.",
        {"weight": ("F8_E4M3", (96, 32)), "scale_weight": ("F32", (1,))},
        ("`scale_weight`", "bf16 repository"),
    ),
    "fp8 with scales for activations": (
        f"{EXPERT}.",
        {"weight": ("BF16", (96, 32)), "input_scale": ("F32", (1,))},
        ("`input_scale`",),
    ),
    "int8 with another scale": (
        f"{EXPERT}.",
        {"weight": ("I8", (96, 32)), "weight_scales": ("F16", (96,))},
        ("`weight_scales`", "bf16 repository"),
    ),
    "int4 packed into the weight": (
        f"{EXPERT}.",
        {"weight": ("U8", (96, 16)), "zeros": ("U8", (96, 1))},
        ("`zeros`", "bf16 repository"),
    ),
    "in a form nobody has thought of": (
        f"{EXPERT}.",
        {"left": ("BF16", (96, 4)), "right": ("BF16", (4, 32))},
        ("`left`, `right`", "bf16 repository"),
    ),
    "quanto": (f"{EXPERT}.", {"weight._data": ("I8", (96, 32)), "weight._scale": ("F32", (96, 1))}, ("quanto",)),
    "EXL3": (f"{EXPERT}.", {"trellis": ("I32", (1, 8)), "suh": ("F16", (32,)), "svh": ("F16", (96,))}, ("EXL3",)),
    "adapter beside its base": (
        f"{EXPERT}.",
        {"lora_A.default.weight": ("F32", (4, 32)), "lora_B.default.weight": ("F32", (96, 4))},
        ("LoRA", "merge_and_unload"),
    ),
    "fused under another name": (
        "model.layers.1.mlp.experts.",
        {"../switch_mlp.down_proj.weight": ("BF16", (8, 96, 32))},
        ("fused", "one tensor per expert"),
    ),
    "fused projections": (
        "model.layers.1.mlp.experts.3.gate_proj.",
        {"../gate_up_proj.weight": ("BF16", (64, 96))},
        ("several projections fused", "one tensor per projection"),
    ),
    "MLX": (
        f"{EXPERT}.",
        {"weight": ("U32", (96, 4)), "scales": ("BF16", (96, 1)), "biases": ("BF16", (96, 1))},
        ("MLX",),
    ),
}
SIZES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_that_are_not_understood_are_named(small: Any, tmp_path: Path, layout: str) -> None:
    """Not "complete the checkpoint": it is complete, in another form."""
    config, tensors = small
    stem, parts, words = LAYOUTS[layout]
    for name in [name for name in tensors if name.startswith(stem)]:
        del tensors[name]
    for part, (dtype, shape) in parts.items():
        if part.startswith("../"):
            stem, part = f"{stem.rstrip('.').rpartition('.')[0]}.", part[3:]
        tensors[stem + part] = (dtype, shape, bytes(int(np.prod(shape)) * SIZES[dtype]))
    source = write_checkpoint(tmp_path / "in", config, {"model.safetensors": tensors})
    text = refused(source, "not understood", "model.safetensors", repr(stem)[:-1], *words)
    assert "Complete" not in text


# ---- the MTP layer -------------------------------------------------------------------------------------------------


def test_without_the_mtp_layer(small: Any, tmp_path: Path) -> None:
    """A promised layer that is absent, or an absent promise: the sentence names the way on, and it leads on."""
    config, tensors = small
    is_mtp = {name: name.startswith("model.layers.4.") for name in tensors}
    main = {name: tensor for name, tensor in tensors.items() if not is_mtp[name]}
    promised = write_checkpoint(tmp_path / "promised", config, {"model.safetensors": main})
    refused(promised, "promises an MTP layer", "model.layers.4.", "--no-mtp")
    partly = dict(tensors)
    del partly["model.layers.4.eh_proj.weight"]
    torn = write_checkpoint(tmp_path / "torn", config, {"model.safetensors": partly})
    refused(torn, "model.layers.4.eh_proj.weight", "--no-mtp")
    denied = write_checkpoint(
        tmp_path / "denied", {**config, "num_nextn_predict_layers": 0}, {"model.safetensors": tensors}
    )
    refused(denied, "hold an MTP layer", "model.layers.4.", "--no-mtp")
    several = write_checkpoint(
        tmp_path / "several", {**config, "num_nextn_predict_layers": 3}, {"model.safetensors": tensors}
    )
    refused(several, "only one MTP layer", "--no-mtp", error=ConfigError)
    plain = write_checkpoint(tmp_path / "plain", {**config, "num_nextn_predict_layers": 0}, {"model.safetensors": main})
    Conversion(plain, "int4").run(tmp_path / "wanted")
    for source in (promised, torn, denied, several):
        out = tmp_path / f"{source.name}-out"
        Conversion(source, "int4", has_mtp=False).run(out)
        assert same_weights(out, tmp_path / "wanted")
        container = Container.open(out)
        assert container.spec.n_mtp == 0
        assert container.converter.arguments["mtp"] == "left out"
        assert Conversion(source, "int4", has_mtp=False).is_finished(out)
        assert [words for _, words in compare_sources(container, source) if words] == []
        Pair(out, source).close()


def test_container_whose_config_disagrees_about_mtp(small: Any, tmp_path: Path) -> None:
    config, tensors = small
    source = write_checkpoint(tmp_path / "in", config, {"model.safetensors": tensors})
    Conversion(source, "int4").run(tmp_path / "with")
    Conversion(source, "int4", has_mtp=False).run(tmp_path / "without")
    for name in ("with", "without"):
        shutil.copy(tmp_path / name / "config.json", tmp_path / f"{name}.json")
    for name, other, words in (("with", "without", "lists an MTP layer"), ("without", "with", "lacks the MTP layer")):
        shutil.copy(tmp_path / f"{other}.json", tmp_path / name / "config.json")
        with pytest.raises(ContainerError, match=rf"{words} .*--no-mtp"):
            Container.open(tmp_path / name)


# ---- other things in the place of files ----------------------------------------------------------------------------


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name",
    [
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        "model.safetensors.index.json", "model-00002-of-00003.safetensors",
    ],
)  # fmt: skip
def test_a_pipe_or_an_endless_device_is_no_file(tmp_path: Path, name: str) -> None:
    source = copy_oracle(tmp_path)
    path = source / name
    for make in (os.mkfifo, lambda p: p.symlink_to("/dev/zero"), lambda p: p.symlink_to(p.name), Path.mkdir):
        path.unlink(missing_ok=True)
        make(path)
        with pytest.raises((ContainerError, ConfigError)) as caught:
            Conversion(source, "int4")
        assert str(path) in str(caught.value)
        assert "is missing" not in str(caught.value)
    path.rmdir()
    path.symlink_to("nowhere")
    with pytest.raises((ContainerError, ConfigError), match="link to nowhere"):
        Conversion(source, "int4")


def test_files_for_people_may_be_anything(tmp_path: Path) -> None:
    source = copy_oracle(tmp_path)
    (source / "LICENSE").mkdir()
    Conversion(source, "int4").run(tmp_path / "out")
    assert not (tmp_path / "out" / "LICENSE").exists()


def test_a_download_cache_of_links(converted: Converted, tmp_path: Path) -> None:
    """Links to regular files are files."""
    source = copy_oracle(tmp_path)
    links = tmp_path / "snapshot"
    links.mkdir()
    for path in source.iterdir():
        (links / path.name).symlink_to(path)
    Conversion(links, "int4").run(tmp_path / "out")
    assert same_weights(tmp_path / "out", converted("glm_moe_dsa", "int4"))


def test_a_tokenizer_that_no_start_accepts_is_said_beforehand(tmp_path: Path) -> None:
    source = copy_oracle(tmp_path)
    (source / "tokenizer.json").write_bytes(b"")
    (note,) = Conversion(source, "int4").notes()
    assert str(source / "tokenizer.json") in note and "No group starts with it" in note


def test_named_templates_are_copied(tmp_path: Path) -> None:
    source = copy_oracle(tmp_path)
    folder = source / "additional_chat_templates"
    folder.mkdir()
    for name in ("tool_use.jinja", "._tool_use.jinja", "run.sh"):
        (folder / name).write_text(name)
    Conversion(source, "int4").run(tmp_path / "out")
    copied = tmp_path / "out" / "additional_chat_templates"
    assert [(path.name, path.read_text()) for path in copied.iterdir()] == [("tool_use.jinja", "tool_use.jinja")]


@pytest.mark.timeout(30)
def test_config_that_calls_for_more_than_there_can_be(small: Any, tmp_path: Path) -> None:
    """Hundreds of millions of expert tensors: refused by the first that is missing, without listing them."""
    config, tensors = small
    huge = {**config, "num_hidden_layers": 2000, "n_routed_experts": 65536, "n_group": 1, "topk_group": 1}
    for key in ("mlp_layer_types", "indexer_types", "index_topk_pattern"):
        huge.pop(key, None)
    source = write_checkpoint(tmp_path / "in", huge, {"model.safetensors": tensors})
    tracemalloc.start()
    with pytest.raises((ContainerError, ConfigError)):
        Conversion(source, "int4", has_mtp=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 500 << 20


@pytest.mark.parametrize(
    ("suffix", "change", "words"),
    [
        ("scales", None, ("down_proj_scales", "Complete")),
        ("scales", ("U8", (16, 96, 3), b"\x7f" * (16 * 96 * 3)), ("down_proj_scales", "[16, 96, 2]")),
        ("blocks", ("U8", (16, 96, 2, 8), bytes(16 * 96 * 16)), ("down_proj_blocks", "[16, 96, 2, 16]")),
    ],
)
def test_mxfp4_whose_parts_do_not_fit_is_refused(
    suffix: str, change: Raw | None, words: tuple[str, ...], tmp_path: Path
) -> None:
    tensors = read_tensors(oracle_dir("gpt_oss"))
    name = f"model.layers.1.mlp.experts.down_proj_{suffix}"
    tensors.pop(name)
    if change:
        tensors[name] = change
    source = write_checkpoint(tmp_path / "source", oracle_config("gpt_oss"), {"model.safetensors": tensors})
    with pytest.raises(ContainerError) as caught:
        Conversion(source, "f32")
    assert all(word in str(caught.value) for word in words), caught.value


def test_an_endless_mxfp4_scale_is_refused(tmp_path: Path) -> None:
    tensors = read_tensors(oracle_dir("gpt_oss"))
    name = "model.layers.1.mlp.experts.down_proj_scales"
    dtype, shape, data = tensors[name]
    tensors[name] = (dtype, shape, b"\xff" * len(data))
    source = write_checkpoint(tmp_path / "source", oracle_config("gpt_oss"), {"model.safetensors": tensors})
    with pytest.raises(ContainerError, match=r"down_proj.*NaN or infinite"):
        Conversion(source, "f32").run(tmp_path / "out")


def test_the_image_tower_is_left_out_and_an_equal_head_is_none_of_its_own(tmp_path: Path) -> None:
    tensors = read_tensors(oracle_dir("gemma4"))
    tower = {f"model.{part}.weight": ("F32", (2,), bytes(8)) for part in ("vision_tower.patch", "embed_vision.proj")}
    tower["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"]
    source = write_checkpoint(tmp_path / "source", oracle_config("gemma4"), {"model.safetensors": {**tensors, **tower}})
    assert Conversion(source, "f32").plan == Conversion(oracle_dir("gemma4"), "f32").plan
    tower["model.audio_tower.patch.weight"] = tower["model.vision_tower.patch.weight"]
    write_checkpoint(source, oracle_config("gemma4"), {"model.safetensors": {**tensors, **tower}})
    with pytest.raises(ContainerError, match="audio_tower"):
        Conversion(source, "f32")


def test_experts_one_by_one_are_those_of_the_stack(converted: Converted, tmp_path: Path) -> None:
    """Of the main layers and of the MTP layer, as repositories in fp8 have them."""
    tensors: dict[str, Raw] = {}
    for name, (dtype, shape, data) in read_tensors(oracle_dir("qwen3_5_moe")).items():
        if ".mlp.experts." not in name:
            tensors[name] = (dtype, shape, data)
            continue
        prefix, _, part = name.rpartition(".")
        names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        n_bytes, one = len(data) // (shape[0] * len(names)), (shape[1] // len(names), shape[2])
        for i in range(shape[0] * len(names)):
            key = f"{prefix}.{i // len(names)}.{names[i % len(names)]}.weight"
            tensors[key] = (dtype, one, data[i * n_bytes : (i + 1) * n_bytes])
    source = write_checkpoint(tmp_path / "in", oracle_config("qwen3_5_moe"), {"model.safetensors": tensors})
    Conversion(source, "int4").run(tmp_path / "out")
    assert same_weights(tmp_path / "out", converted("qwen3_5_moe", "int4"))
    tensors.pop("mtp.layers.0.mlp.experts.5.up_proj.weight")
    refused(write_checkpoint(source, oracle_config("qwen3_5_moe"), {"model.safetensors": tensors}), "mtp.layers.0")


def test_a_model_without_its_mtp_layer_under_names_of_its_own(converted: Converted, tmp_path: Path) -> None:
    """--no-mtp leaves it out of the tensors and of config.json, wherever that says so."""
    Conversion(oracle_dir("qwen3_5_moe"), "int4", has_mtp=False).run(tmp_path / "out")
    container = Container.open(tmp_path / "out")
    assert (container.spec.n_mtp, len(container.experts)) == (0, 4)
    for file in container.experts.values():
        assert file.path.read_bytes() == (converted("qwen3_5_moe", "int4") / file.path.name).read_bytes()
