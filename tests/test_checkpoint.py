"""Checkpoints: config.json is read and never assumed, every tensor is accounted for, the model is in memory once.

Checkpoints are written here from random models, in the names and layouts of the published ones.
"""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import tiktoken
import torch
from conftest import GPT2, NANO
from safetensors.torch import load_file, save_file
from tiktoken_ext import openai_public

from nanograph import LLM, SamplingParams, checkpoint, generate
from nanograph.checkpoint import choose_dtype, find_folder, load_model, random_model, read_config, read_dtype
from nanograph.kernels import reference
from nanograph.kernels.reference import Mxfp4, decode_mxfp4
from nanograph.options import RANDOM_WEIGHTS

CPU = torch.device("cpu")
GPT_OSS_CONFIG = {
    "model_type": "gpt_oss",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "dtype": "float32",
}
GPT2_CONFIG = {
    "model_type": "gpt2",
    "vocab_size": 64,
    "n_positions": 256,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 64,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_config(folder, raw, **changes):
    """config.json with changes; the value ... removes a key."""
    content = {key: value for key, value in {**raw, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def tensors_of(raw, prefix="transformer."):
    """Random tensors of a checkpoint, {name: tensor}, with the names and shapes of the published files."""
    torch.manual_seed(0)
    if raw["model_type"] == "gpt2":
        hidden, inner = raw["n_embd"], raw["n_inner"]
        shapes = {
            f"{prefix}wte.weight": (raw["vocab_size"], hidden),
            f"{prefix}wpe.weight": (raw["n_positions"], hidden),
        }
        norms, layers = {f"{prefix}ln_f.weight": (hidden,), f"{prefix}ln_f.bias": (hidden,)}, {}
        for layer in range(raw["n_layer"]):
            block = {"attn.c_attn": (hidden, 3 * hidden), "attn.c_proj": (hidden, hidden)}
            block |= {"mlp.c_fc": (hidden, inner), "mlp.c_proj": (inner, hidden)}
            for name, shape in block.items():
                layers |= {f"{prefix}h.{layer}.{name}.weight": shape, f"{prefix}h.{layer}.{name}.bias": shape[1:]}
            for name in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"):
                norms[f"{prefix}h.{layer}.{name}"] = (hidden,)
    else:
        hidden, inner, experts = raw["hidden_size"], raw["intermediate_size"], raw["num_local_experts"]
        heads, kv = (raw[key] * raw["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
        shapes = {
            "model.embed_tokens.weight": (raw["vocab_size"], hidden),
            "lm_head.weight": (raw["vocab_size"], hidden),
        }
        norms, layers = {"model.norm.weight": (hidden,)}, {}
        for layer in range(raw["num_hidden_layers"]):
            block = {"q": (heads, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, heads)}
            linear = {f"self_attn.{name}_proj": shape for name, shape in block.items()}
            for name, shape in {**linear, "mlp.router": (experts, hidden)}.items():
                names = (f"model.layers.{layer}.{name}.{kind}" for kind in ("weight", "bias"))
                layers |= dict(zip(names, (shape, shape[:1])))
            for name, shape in {"gate_up": (hidden, 2 * inner), "down": (inner, hidden)}.items():
                expert = f"model.layers.{layer}.mlp.experts.{name}_proj"
                layers |= {expert: (experts, *shape), f"{expert}_bias": (experts, shape[1])}
            layers[f"model.layers.{layer}.self_attn.sinks"] = (raw["num_attention_heads"],)
            for name in ("input_layernorm", "post_attention_layernorm"):
                norms[f"model.layers.{layer}.{name}.weight"] = (hidden,)
    tensors = {name: 0.3 * torch.randn(shape) for name, shape in {**shapes, **layers}.items()}
    return tensors | {name: 1 + 0.3 * torch.randn(shape) for name, shape in norms.items()}


def pack(tensors):
    """The same tensors with random MXFP4 experts, and those with the experts' values."""
    packed, plain = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = packed.pop(name).shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 124, blocks.shape[:-1], dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = decode_mxfp4(Mxfp4(blocks.flatten(-2), scales), torch.float32).mT.contiguous()
    return packed, plain


@pytest.fixture
def gpt_oss(tmp_path):
    save_file(tensors_of(GPT_OSS_CONFIG), write_config(tmp_path, GPT_OSS_CONFIG) / "model.safetensors")
    return tmp_path


@pytest.fixture
def gpt2(tmp_path):
    save_file(tensors_of(GPT2_CONFIG), write_config(tmp_path, GPT2_CONFIG) / "model.safetensors")
    return tmp_path


def load(folder, dtype=torch.float32):
    config = read_config(folder)
    return load_model(folder, config, reference, config.max_positions, CPU, dtype)


def logits(model, **options):
    """Logits of a prompt's last position."""
    llm = LLM(model, device="cpu", mode="eager", max_requests=1, **options)
    llm.add(list(range(1, 20)))
    llm.batch.fill(llm.scheduler.schedule())
    with torch.no_grad():
        return llm.executor.run().clone()


def refusal(action, *args):
    """The one line of the ValueError that `action` raises."""
    with pytest.raises(ValueError, match=r"\w") as error:
        action(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


# Where a checkpoint is


def test_unknown_model_is_refused_and_named():
    for model in ("nanno", "./folder", "/no/such/folder", "a/b/c", "../folder"):
        assert repr(model) in refusal(find_folder, model)


def test_a_repository_is_downloaded_without_inner_folders(monkeypatch, tmp_path):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    calls = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *args, **kw: calls.append((args, kw)) or str(tmp_path)
    )
    assert find_folder("openai-community/gpt2") == tmp_path
    [(args, patterns)] = calls
    assert args == ("openai-community/gpt2",)
    files = [
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
    ]
    unwanted = ["pytorch_model.bin", "original/model.safetensors", "metal/model.bin", "onnx/config.json", "README.md"]
    assert list(huggingface_hub.utils.filter_repo_objects(files + unwanted, **patterns)) == files


def test_without_the_hub_extra_or_network_one_line_says_so(monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def no_network(*_, **__):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    assert "no route" in refusal(find_folder, "openai-community/gpt2")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install nanograph[hub]" in refusal(find_folder, "openai-community/gpt2")


def test_a_folder_of_links_as_in_the_hubs_cache(gpt_oss, tmp_path):
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(gpt_oss / name)
    assert torch.equal(logits(load(snapshot)), logits(load(gpt_oss)))


# config.json


def test_configs_are_read(gpt_oss):
    assert read_config(gpt_oss) == replace(NANO, intermediate_size=32)
    write_config(gpt_oss, GPT2_CONFIG)
    assert read_config(gpt_oss) == GPT2
    write_config(gpt_oss, GPT2_CONFIG, n_inner=None)
    assert read_config(gpt_oss).intermediate_size == 128


@pytest.mark.parametrize("value", ["32", -1, 0, 10**12, 10**400, 3.5, True, None, ..., [32], {"a": 1}], ids=repr)
@pytest.mark.parametrize(
    ("raw", "key"),
    [
        *((GPT_OSS_CONFIG, key) for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_local_experts")),
        *((GPT_OSS_CONFIG, key) for key in ("max_position_embeddings", "head_dim", "sliding_window")),
        *((GPT2_CONFIG, key) for key in ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions")),
    ],
    ids=lambda value: value if isinstance(value, str) else value["model_type"],
)
def test_sizes_that_are_none(tmp_path, raw, key, value):
    message = refusal(read_config, write_config(tmp_path, raw, **{key: value}))
    assert f"{tmp_path / 'config.json'}: {key} must be" in message
    assert len(message) < 300


@pytest.mark.parametrize(
    ("raw", "key", "value"),
    [
        (GPT_OSS_CONFIG, "model_type", "llama"),
        (GPT_OSS_CONFIG, "model_type", ...),
        (GPT_OSS_CONFIG, "hidden_act", "gelu"),
        (GPT_OSS_CONFIG, "attention_bias", False),
        (GPT_OSS_CONFIG, "swiglu_alpha", 1.0),
        (GPT_OSS_CONFIG, "swiglu_limit", "7"),
        (GPT_OSS_CONFIG, "swiglu_limit", float("nan")),
        (GPT_OSS_CONFIG, "rms_norm_eps", ...),
        (GPT_OSS_CONFIG, "rms_norm_eps", float("inf")),
        (GPT_OSS_CONFIG, "tie_word_embeddings", "yes"),
        (GPT_OSS_CONFIG, "num_attention_heads", 5),
        (GPT_OSS_CONFIG, "num_experts_per_tok", 5),
        (GPT_OSS_CONFIG, "head_dim", 7),
        (GPT_OSS_CONFIG, "layer_types", ["sliding_attention"]),
        (GPT_OSS_CONFIG, "layer_types", ["sliding_attention", "linear_attention"]),
        (GPT_OSS_CONFIG, "layer_types", ["sliding_attention", ["full_attention"]]),
        (GPT_OSS_CONFIG, "layer_types", ...),
        (GPT_OSS_CONFIG, "quantization_config", {"quant_method": "gptq"}),
        (GPT_OSS_CONFIG, "quantization_config", "mxfp4"),
        (GPT_OSS_CONFIG, "rope_theta", ...),
        (GPT_OSS_CONFIG, "rope_theta", "10000"),
        (GPT_OSS_CONFIG, "rope_type", "longrope"),
        (GPT_OSS_CONFIG, "full_attention", {"rope_type": "default", "rope_theta": 10000.0}),
        (GPT_OSS_CONFIG, "partial_rotary_factor", 0.5),
        (GPT2_CONFIG, "activation_function", "gelu"),
        (GPT2_CONFIG, "activation_function", "relu"),
        (GPT2_CONFIG, "scale_attn_weights", False),
        (GPT2_CONFIG, "scale_attn_by_inverse_layer_idx", True),
        (GPT2_CONFIG, "reorder_and_upcast_attn", True),
        (GPT2_CONFIG, "add_cross_attention", True),
        (GPT2_CONFIG, "quantization_config", {"quant_method": "gptq"}),
        (GPT2_CONFIG, "layer_norm_epsilon", "1e-5"),
        (GPT2_CONFIG, "n_embd", 30),
    ],
    ids=lambda value: str(value["model_type"] if isinstance(value, dict) and "model_type" in value else value)[:40],
)
def test_values_that_are_not_supported_are_refused_by_name(tmp_path, raw, key, value):
    changes = {key: value}
    if key in ("rope_theta", "rope_type", "full_attention", "partial_rotary_factor"):
        rope = {**GPT_OSS_CONFIG["rope_parameters"], key: value}
        changes = {"rope_parameters": {name: value for name, value in rope.items() if value is not ...}}
    message = refusal(read_config, write_config(tmp_path, raw, **changes))
    assert str(tmp_path / "config.json") in message
    assert key in message or "quant_method" in message
    assert not isinstance(value, str) or repr(value) in message


@pytest.mark.parametrize("key", ["factor", "original_max_position_embeddings"])
@pytest.mark.parametrize("value", [..., "8", 0, -2])
def test_yarn_is_read_not_assumed(tmp_path, key, value):
    rope = {name: value for name, value in {**YARN, key: value}.items() if value is not ...}
    assert key in refusal(read_config, write_config(tmp_path, GPT_OSS_CONFIG, rope_parameters=rope))


def test_mxfp4_needs_whole_blocks(tmp_path):
    quantized = {"quantization_config": {"quant_method": "mxfp4"}}
    for key in ("hidden_size", "intermediate_size"):
        assert key in refusal(read_config, write_config(tmp_path, GPT_OSS_CONFIG, **quantized, **{key: 48}))


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff\xfe", b"[" * 100_000, b"null"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_a_file_that_is_no_json_object_is_named(gpt_oss, name, content, capsys):
    (gpt_oss / "model.safetensors").unlink()
    (gpt_oss / name).write_bytes(content)
    assert generate.main(["--model", str(gpt_oss)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert str(gpt_oss / name) in line


def test_an_empty_folder(tmp_path):
    assert str(tmp_path / "config.json") in refusal(LLM, str(tmp_path))


def greedy(folder, **params):
    [result] = LLM(str(folder), device="cpu").generate([[1, 2, 3]], SamplingParams(0, max_new_tokens=3, **params))
    return result


@pytest.mark.parametrize(
    ("in_config", "in_generation"),
    [
        ("token", ...),
        ("list", ...),
        (..., "token"),
        (..., "list"),
        ("other", "list"),
        ("list", "other"),
        ("token", None),
    ],
)
def test_any_listed_end_token_stops(gpt_oss, in_config, in_generation):
    token = greedy(gpt_oss).token_ids[0]
    other = (token + 1) % 64
    values = {"token": token, "list": [other, token], "other": other, None: None, ...: ...}
    write_config(gpt_oss, GPT_OSS_CONFIG, eos_token_id=values[in_config])
    if in_generation is not ...:
        (gpt_oss / "generation_config.json").write_text(json.dumps({"eos_token_id": values[in_generation]}))
    result, ignoring = greedy(gpt_oss), greedy(gpt_oss, ignore_eos=True)
    assert (result.finish_reason, result.token_ids) == ("stop", [token])
    assert (ignoring.finish_reason, len(ignoring.token_ids)) == ("length", 3)


@pytest.mark.parametrize("value", [None, [], ...])
def test_no_end_token_is_no_error(gpt_oss, value):
    write_config(gpt_oss, GPT_OSS_CONFIG, eos_token_id=value)
    assert read_config(gpt_oss).eos_ids == ()
    (gpt_oss / "generation_config.json").write_text("{}")
    assert read_config(gpt_oss).eos_ids == ()


@pytest.mark.parametrize("value", [64, -1, [5, 64], "5", 5.0, True, [[5]]])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_end_token_that_is_none(tmp_path, file, value):
    write_config(tmp_path, GPT_OSS_CONFIG, **({"eos_token_id": value} if file == "config.json" else {}))
    if file != "config.json":
        (tmp_path / file).write_text(json.dumps({"eos_token_id": value}))
    message = refusal(read_config, tmp_path)
    assert f"{tmp_path / file}: eos_token_id" in message


# dtypes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": ..., "torch_dtype": "float16"}, torch.float16),
        ({"dtype": None, "torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": ...}, torch.float32),  # the embedding's
    ],
)
def test_the_saved_dtype(gpt_oss, changes, expected):
    assert read_dtype(write_config(gpt_oss, GPT_OSS_CONFIG, **changes)) == expected


@pytest.mark.parametrize("value", ["float8_e4m3fn", "int8", 16, ["float32"]])
def test_a_dtype_that_is_not_supported(gpt_oss, value):
    assert "dtype" in refusal(LLM, str(write_config(gpt_oss, GPT_OSS_CONFIG, dtype=value)), "eager", "cpu")


@pytest.mark.parametrize("name", RANDOM_WEIGHTS)
def test_cards_without_bfloat16(monkeypatch, capsys, name):
    config = read_config(find_folder("nano", name))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    cuda = torch.device("cuda", 0)
    assert choose_dtype("float32", torch.bfloat16, config, cuda) == torch.float32
    for asked in (None, "bfloat16"):
        if name.startswith("gpt-oss"):
            assert "float32" in refusal(choose_dtype, asked, torch.bfloat16, config, cuda)
        else:
            assert choose_dtype(asked, torch.bfloat16, config, cuda) == torch.float16
            assert len(capsys.readouterr().err.splitlines()) == 1
    for published in (replace(config, num_experts=8, hidden_size=2880, mxfp4=False), replace(config, mxfp4=True)):
        assert "float32" in refusal(choose_dtype, None, torch.bfloat16, published, cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert choose_dtype(None, torch.bfloat16, config, cuda) == torch.bfloat16
    assert choose_dtype(None, torch.bfloat16, config, CPU) == torch.float32
    assert choose_dtype("bfloat16", torch.float32, config, CPU) == torch.bfloat16


# Tensors


@pytest.mark.parametrize("raw", [GPT_OSS_CONFIG, GPT2_CONFIG], ids=lambda raw: raw["model_type"])
def test_each_tensor_is_needed_and_no_other_taken(tmp_path, raw):
    write_config(tmp_path, raw)
    path, tensors = tmp_path / "model.safetensors", tensors_of(raw)
    for name in tensors:
        save_file({other: tensor for other, tensor in tensors.items() if other != name}, path)
        message = refusal(load, tmp_path)
        assert str(tmp_path) in message
        assert name in message
    for name in (
        "extra.weight",
        "model.layers.2.input_layernorm.weight",
        "h.0.attn.bias.weight",
        "h.0.crossattention.bias",
    ):
        save_file({**tensors, name: torch.ones(2)}, path)
        message = refusal(load, tmp_path)
        assert str(path) in message
        assert name in message


@pytest.mark.parametrize("raw", [GPT_OSS_CONFIG, GPT2_CONFIG], ids=lambda raw: raw["model_type"])
def test_each_shape_is_checked_and_both_are_named(tmp_path, raw):
    write_config(tmp_path, raw)
    tensors = tensors_of(raw)
    for name, tensor in tensors.items():
        wrong = torch.cat([tensor, tensor])
        save_file({**tensors, name: wrong}, tmp_path / "model.safetensors")
        message = refusal(load, tmp_path)
        for part in (str(tmp_path / "model.safetensors"), name, str(list(wrong.shape)), str(list(tensor.shape))):
            assert part in message


def test_shares_of_q_k_v_are_checked_one_by_one(gpt_oss):
    tensors, name = tensors_of(GPT_OSS_CONFIG), "model.layers.0.self_attn.{}_proj.bias"
    tensors[name.format("k")], tensors[name.format("q")] = tensors[name.format("q")], tensors[name.format("k")]
    save_file(tensors, gpt_oss / "model.safetensors")
    assert "_proj.bias has shape" in refusal(load, gpt_oss)


def test_integers_are_no_weights(gpt_oss):
    tensors = tensors_of(GPT_OSS_CONFIG)
    save_file({**tensors, "model.norm.weight": torch.ones(32, dtype=torch.int32)}, gpt_oss / "model.safetensors")
    message = refusal(load, gpt_oss)
    assert "model.norm.weight" in message
    assert "I32" in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_gpt2_with_and_without_prefix_and_mask(tmp_path, prefix, dtype):
    tensors = tensors_of(GPT2_CONFIG, prefix)
    masks = {f"{prefix}h.{layer}.attn.bias": torch.ones(1, 1, 256, 256) for layer in range(2)}
    masks |= {f"{prefix}h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in range(2)}
    save_file({**tensors, **masks}, write_config(tmp_path, GPT2_CONFIG) / "model.safetensors")
    model = load(tmp_path, dtype)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.embedding.weight, tensors[f"{prefix}wte.weight"].to(dtype))
    assert torch.equal(model.blocks[1].qkv.weight, tensors[f"{prefix}h.1.attn.c_attn.weight"].T.to(dtype))
    assert torch.equal(model.blocks[0].attention_output.weight, tensors[f"{prefix}h.0.attn.c_proj.weight"].T.to(dtype))
    assert torch.equal(model.blocks[0].mlp.down.bias, tensors[f"{prefix}h.0.mlp.c_proj.bias"].to(dtype))
    assert model.blocks[0].qkv.weight.is_contiguous()


def test_gpt_oss_fills_each_part_of_each_parameter(gpt_oss):
    model, tensors = load(gpt_oss), tensors_of(GPT_OSS_CONFIG)
    theirs, block = "model.layers.1.", model.blocks[1]
    for kind in ("weight", "bias"):
        parts = [tensors[f"{theirs}self_attn.{name}_proj.{kind}"] for name in "qkv"]
        assert torch.equal(getattr(block.qkv, kind), torch.cat(parts))
    assert torch.equal(block.mlp.gate_up, tensors[f"{theirs}mlp.experts.gate_up_proj"].mT)
    assert torch.equal(block.mlp.down, tensors[f"{theirs}mlp.experts.down_proj"].mT)
    assert torch.equal(block.attention.sinks, tensors[f"{theirs}self_attn.sinks"])
    assert torch.equal(model.head.weight, tensors["lm_head.weight"])


@pytest.mark.parametrize("raw", [GPT_OSS_CONFIG, GPT2_CONFIG], ids=lambda raw: raw["model_type"])
def test_no_parameter_is_left_unfilled(tmp_path, raw, monkeypatch):
    def allocate_dirty(model, device, allocate=checkpoint.allocate):
        allocate(model, device)
        for parameter in model.parameters():
            parameter.fill_(torch.nan)

    monkeypatch.setattr(checkpoint, "allocate", allocate_dirty)
    save_file(tensors_of(raw), write_config(tmp_path, raw) / "model.safetensors")
    assert all(parameter.isfinite().all() for parameter in load(tmp_path).parameters())


@pytest.mark.parametrize(
    ("raw", "embedding"), [(GPT2_CONFIG, "transformer.wte.weight"), (GPT_OSS_CONFIG, "model.embed_tokens.weight")]
)
def test_tied_heads_go_by_either_name(tmp_path, raw, embedding):
    write_config(tmp_path, raw, tie_word_embeddings=True)
    path, tensors, head = tmp_path / "model.safetensors", tensors_of(raw), "lm_head.weight"
    matrix = tensors.pop(embedding)
    tensors.pop(head, None)
    for stored in ({embedding: matrix}, {head: matrix}, {embedding: matrix, head: matrix.clone()}):
        save_file({**tensors, **stored}, path)
        model = load(tmp_path)
        assert model.head.weight is model.embedding.weight
        assert torch.equal(model.head.weight, matrix)
    for wrong in (matrix + 1, matrix.bfloat16(), matrix[:-1].clone()):
        save_file({**tensors, embedding: matrix, head: wrong}, path)
        assert head in refusal(load, tmp_path)
    save_file(tensors, path)
    message = refusal(load, tmp_path)
    assert embedding in message
    assert head in message


def test_an_untied_head_is_its_own(gpt2):
    write_config(gpt2, GPT2_CONFIG, tie_word_embeddings=False)
    assert "lm_head.weight" in refusal(load, gpt2)
    head = torch.randn(64, 32)
    save_file({**tensors_of(GPT2_CONFIG), "lm_head.weight": head}, gpt2 / "model.safetensors")
    model = load(gpt2)
    assert torch.equal(model.head.weight, head)
    assert not torch.equal(model.embedding.weight, head)


# Files


def shard(folder):
    """Cut model.safetensors in two, at the middle of the names: experts' blocks and scales may part."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: SHARDS[index >= len(names) // 2] for index, name in enumerate(names)}
    for path in SHARDS:
        save_file({name: tensors[name] for name in names if weight_map[name] == path}, folder / path)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_are_the_same_model(gpt_oss):
    expected = logits(load(gpt_oss))
    shard(gpt_oss)
    assert torch.equal(logits(load(gpt_oss)), expected)


def test_a_missing_shard_is_named_before_any_is_opened(gpt_oss, monkeypatch):
    shard(gpt_oss)
    (gpt_oss / SHARDS[1]).unlink()
    monkeypatch.setattr(checkpoint, "safe_open", lambda *_, **__: pytest.fail("opened a shard"))
    assert str(gpt_oss / SHARDS[1]) in refusal(load, gpt_oss)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "..", ".", "", "inner/../../x", 5, None, ["x"]]
)
def test_an_index_that_points_elsewhere(gpt_oss, name):
    inner = gpt_oss / "inner"
    inner.mkdir()
    weight_map = shard(gpt_oss)
    for file in ("config.json", *SHARDS):
        (inner / file).write_bytes((gpt_oss / file).read_bytes())
    write_index(inner, {**weight_map, "lm_head.weight": name})
    message = refusal(load, inner)
    assert "model.safetensors.index.json" in message


@pytest.mark.parametrize("content", [{}, {"weight_map": []}, {"weight_map": None}])
def test_an_index_without_map(gpt_oss, content):
    (gpt_oss / "model.safetensors").unlink()
    (gpt_oss / "model.safetensors.index.json").write_text(json.dumps(content))
    assert "weight_map" in refusal(load, gpt_oss)


def test_a_tensor_in_two_shards(gpt_oss):
    shard(gpt_oss)
    tensors = load_file(gpt_oss / SHARDS[0])
    save_file({**load_file(gpt_oss / SHARDS[1]), **dict(list(tensors.items())[:1])}, gpt_oss / SHARDS[1])
    assert next(iter(tensors)) in refusal(load, gpt_oss)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 14782456\n" % (b"0" * 64)
BROKEN = {
    "empty": lambda data: b"",
    "20 bytes": lambda data: data[:20],
    "half": lambda data: data[: len(data) // 2],
    "last byte gone": lambda data: data[:-1],
    "trailing bytes": lambda data: data + b"\0\0\0\0",
    "Git LFS pointer": lambda data: POINTER,
}


@pytest.mark.parametrize("damage", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file(gpt_oss, capsys, damage):
    shard(gpt_oss)
    path = gpt_oss / SHARDS[1]
    path.write_bytes(damage(path.read_bytes()))
    assert generate.main(["--model", str(gpt_oss), "--device", "cpu"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert str(path) in line
    assert "download it again" in line
    assert "git lfs pull" in line


# MXFP4


@pytest.fixture
def mxfp4(gpt_oss):
    """A packed checkpoint in two shards, and beside it, in `plain`, one of the decoded values."""
    torch.manual_seed(0)
    packed, plain = pack(tensors_of(GPT_OSS_CONFIG))
    save_file(packed, gpt_oss / "model.safetensors")
    write_config(gpt_oss, GPT_OSS_CONFIG, quantization_config={"quant_method": "mxfp4"})
    shard(gpt_oss)
    (gpt_oss / "plain").mkdir()
    save_file(plain, write_config(gpt_oss / "plain", GPT_OSS_CONFIG) / "model.safetensors")
    return gpt_oss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_is_decoded_where_no_kernel_reads_it(mxfp4, capsys, dtype):
    model, plain = load(mxfp4, dtype), load(mxfp4 / "plain", dtype)
    assert "MXFP4" in capsys.readouterr().err
    assert not model.config.mxfp4
    for name, parameter in plain.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


def test_mxfp4_stays_packed_where_a_kernel_reads_it(mxfp4, monkeypatch, capsys):
    expected = logits(load(mxfp4 / "plain"))
    monkeypatch.setattr(checkpoint, "can_stay_packed", lambda device: True)
    model, tensors = load(mxfp4, torch.bfloat16), {}
    assert capsys.readouterr().err == ""
    for path in SHARDS:
        tensors |= load_file(mxfp4 / path)
    for name in ("gate_up", "down"):
        weight, theirs = getattr(model.blocks[1].mlp, name), f"model.layers.1.mlp.experts.{name}_proj"
        assert torch.equal(weight.blocks, tensors[f"{theirs}_blocks"].flatten(-2))
        assert torch.equal(weight.scales, tensors[f"{theirs}_scales"])
        assert weight.shape == (4, 64 if name == "gate_up" else 32, 32)
    packed = logits(load(mxfp4))
    assert (packed - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("mode", ["eager", "breakable", "full"])
def test_packed_weights_in_each_mode(monkeypatch, mxfp4, mode):
    """19 tokens go through whole experts, the 1 token after them through gathered ones."""
    expected = greedy_ids(load(mxfp4 / "plain"), "eager")
    monkeypatch.setattr(checkpoint, "can_stay_packed", lambda device: True)
    assert greedy_ids(load(mxfp4), mode) == expected


def greedy_ids(model, mode):
    llm = LLM(model, mode, "cpu", max_batch_tokens=32)
    [result] = llm.generate([list(range(1, 20))], SamplingParams(0, max_new_tokens=5))
    assert llm.stats.eager_steps in (0, 5)
    return result.token_ids


def test_mxfp4_values():
    """Byte 0x21 holds 1, then 2 (codes; 0.5 and 1): the low half comes first. The format's 16 values, three scales."""
    blocks = torch.full((1, 1, 16), 0x21, dtype=torch.uint8)
    for scale in (0, 127, 128, 250):
        values = decode_mxfp4(Mxfp4(blocks, torch.full((1, 1, 1), scale, dtype=torch.uint8)), torch.float32)
        assert values.flatten().tolist() == [0.5 * 2.0 ** (scale - 127), 2.0 ** (scale - 127)] * 16
    codes = torch.tensor([2 * code + 1 << 4 | 2 * code for code in range(8)] * 2, dtype=torch.uint8).view(1, 1, 16)
    values = decode_mxfp4(Mxfp4(codes, torch.full((1, 1, 1), 127, dtype=torch.uint8)), torch.bfloat16)
    expected = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    assert values.flatten().tolist() == expected * 2


# Memory


MEASURE = """
import sys, threading, time, torch
from pathlib import Path
from nanograph import checkpoint
from nanograph.kernels import reference

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def watch():
    while True:
        samples.append(anonymous())
        time.sleep(0.0005)

folder, samples = Path(sys.argv[1]), []
config = checkpoint.read_config(folder)
before = anonymous()
threading.Thread(target=watch, daemon=True).start()
model = checkpoint.load_model(folder, config, reference, 64, torch.device("cpu"), torch.float32)
print(max(samples) - before, sum(parameter.nbytes for parameter in model.parameters()))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_model_is_in_memory_once(tmp_path):
    """While it loads, too: no tensor is there twice, whatever the file's dtype and layout."""
    raw = {**GPT_OSS_CONFIG, "hidden_size": 1024, "intermediate_size": 1024}
    raw |= {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    tensors = {name: tensor.bfloat16() for name, tensor in tensors_of(raw).items()}
    save_file(tensors, write_config(tmp_path, raw) / "model.safetensors")
    shard(tmp_path)
    output = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True)
    rise, size = map(int, output.stdout.split())
    assert 0.9 * size < rise < 1.1 * size


def test_too_little_memory_is_said_before_loading(gpt_oss, monkeypatch):
    monkeypatch.setattr(checkpoint, "free_memory", lambda device: 30e3)
    monkeypatch.setattr(checkpoint, "fill", lambda *_: pytest.fail("loaded"))
    message = refusal(load, gpt_oss)
    assert "not enough memory" in message
    assert message.count(" GB ") == 2


# Random weights


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
def test_the_published_shapes(monkeypatch, name):
    """117 and 21 billion parameters, of which 5.1 and 3.6 compute a token (gpt-oss model card, table 1)."""
    config = read_config(find_folder("nano", name))
    monkeypatch.setattr(checkpoint, "can_stay_packed", lambda device: True)
    model = checkpoint.model_without_memory(config, reference, 8192, CPU, torch.bfloat16)
    sizes = {name: p.numel() * (2 if name.endswith("_blocks") else 1) for name, p in model.named_parameters()}
    total = sum(size for name, size in sizes.items() if not name.endswith("_scales"))
    experts = sum(size for name, size in sizes.items() if name.endswith(("_blocks", "gate_up_bias", "down_bias")))
    active = total - experts * (1 - 4 / config.num_experts) - sizes["embedding.weight"]
    billions = (total / 1e9, active / 1e9)
    assert billions == pytest.approx((20.91, 3.61) if name == "gpt-oss-20b" else (116.83, 5.13), abs=0.005)
    assert config.windows[:2] == (128, 0)
    assert config.eos_ids == (200002, 199999, 200012)


def test_gpt2s_published_shape():
    model = checkpoint.model_without_memory(
        read_config(find_folder("nano", "gpt2")), reference, 1024, CPU, torch.float32
    )
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
def test_a_shape_too_large_is_refused_with_both_figures(monkeypatch, name, capsys):
    monkeypatch.setattr(checkpoint, "free_memory", lambda device: 16e9)
    assert generate.main(["--random-weights", name, "--device", "cpu", "--dtype", "bfloat16"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "16.0 GB are available" in line
    assert ("41.8 GB" if name == "gpt-oss-20b" else "233.7 GB") in line


def test_random_weights_depend_on_the_seed_alone():
    one, same = (
        LLM(random_weights="nano", mode="eager", device="cpu"),
        LLM(random_weights="nano", mode="full", device="cpu"),
    )
    for name, parameter in one.model.named_parameters():
        assert torch.equal(parameter, same.model.get_parameter(name))
    other = random_model(one.config, reference, 1024, CPU, torch.float32, seed=1)
    assert not torch.equal(other.head.weight, one.model.head.weight)
    assert one.tokenizer.decode(one.tokenizer.encode("ROMEO:")) == "ROMEO:"


def test_random_mxfp4_weights_are_sane(monkeypatch):
    """Over 12 layers, numbers stay finite and of moderate size, and the logits differ from each other."""
    monkeypatch.setattr(checkpoint, "can_stay_packed", lambda device: True)
    config = replace(NANO, mxfp4=True, num_layers=12, hidden_size=512, intermediate_size=512, windows=(16, 0) * 6)
    model = random_model(config, reference, 256, CPU, torch.bfloat16)
    sizes = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, out: sizes.append(out.float().abs().max()))
    rows = logits(model).float()
    assert 0 < min(sizes) <= max(sizes) < 1000
    assert rows.isfinite().all()
    assert 0.05 < rows.std() < 50


def test_model_and_random_weights_exclude_each_other(gpt_oss):
    assert "give one of them" in refusal(lambda: LLM(str(gpt_oss), random_weights="gpt2"))
    assert "gpt2" in refusal(lambda: LLM(random_weights="gpt3"))


# --chat


@pytest.fixture
def harmony(monkeypatch, tmp_path):
    """A tiny gpt-oss with gpt-oss's special tokens, over single bytes. Returns its folder and the encoding."""
    single_bytes = {bytes([byte]): byte for byte in range(256)}
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: single_bytes)
    encoding = tiktoken.Encoding(**openai_public.o200k_harmony())
    monkeypatch.setattr(tiktoken, "get_encoding", {"o200k_harmony": encoding}.__getitem__)
    raw = {**GPT_OSS_CONFIG, "vocab_size": 201088, "hidden_size": 4, "tie_word_embeddings": True}
    tensors = tensors_of(raw)
    del tensors["lm_head.weight"]
    tensors["model.embed_tokens.weight"][256:] = 0  # only bytes are likely
    save_file(tensors, write_config(tmp_path, raw, max_position_embeddings=1024) / "model.safetensors")
    return tmp_path, encoding


def test_chat_frames_what_the_user_says_as_plain_text(harmony):
    folder, encoding = harmony
    llm = LLM(str(folder), device="cpu")
    [ids] = generate.frame_as_chat(llm, ["What is <|return|>?"])
    text = encoding.decode(ids)
    assert text.startswith("<|start|>system<|message|>You are ChatGPT")
    assert text.endswith("<|end|><|start|>user<|message|>What is <|return|>?<|end|><|start|>assistant")
    marks = [200006, 200008, 200007] * 2 + [200006]  # start, message, end; and where the answer starts
    assert [token for token in ids if token > 255] == marks
    assert llm.scheduler.eos_ids == {200002, 200012}  # return, call
    answer = [200005, *b"final", 200008, *b"4.", 200002]
    assert llm.tokenizer.decode(answer) == "<|channel|>final<|message|>4."


def test_chat_on_the_command_line(harmony, capsys):
    folder, _ = harmony
    args = ["--model", str(folder), "--device", "cpu", "--max-new-tokens", "8", "--temperature", "0", "--prompt", "hi"]
    outputs = []
    for extra in ([], ["--chat"]):
        assert generate.main([*args, *extra]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] != outputs[1]
    llm = LLM(str(folder), device="cpu")
    [result] = llm.generate(generate.frame_as_chat(llm, ["hi"]), SamplingParams(0, max_new_tokens=8))
    assert outputs[1] == result.text + "\n"


@pytest.mark.parametrize("model", [["--model", "nano"], ["--random-weights", "nano"], ["--model", "gpt2"]])
def test_chat_is_refused_for_other_models(gpt2, capsys, model):
    model = [str(gpt2) if word == "gpt2" else word for word in model]
    assert generate.main([*model, "--device", "cpu", "--chat"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "--chat" in line
