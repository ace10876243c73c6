"""Checkpoints: config.json is read and never assumed, every tensor is accounted for, the model is in memory once.

Checkpoints are written here from random models, in the names and layouts of the published ones.
"""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiktoken
import torch
from conftest import GPT2, NANO, make_model
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
    for model in ("nanno", "./no/folder", "/no/such/folder", "a/b/c", ""[:0] or "../x"):
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
    ids=str,
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


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1, 2]", b"\xff\xfe", b"[" * 100_000, b"null", b'{"vocab_size": NaN}']
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_a_file_that_is_no_json_object_is_named(gpt_oss, name, content, capsys):
    if name == "generation_config.json" and b"NaN" in content:
        pytest.skip("a JSON object without eos_token_id")
    (gpt_oss / "model.safetensors").unlink()
    (gpt_oss / name).write_bytes(content)
    assert generate.main(["--model", str(gpt_oss)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert str(gpt_oss / name) in line


def test_an_empty_folder(tmp_path):
    assert str(tmp_path / "config.json") in refusal(LLM, str(tmp_path))


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (5, ..., {5}),
        ([5, 6], ..., {5, 6}),
        (..., ..., set()),
        (None, None, set()),
        (..., 7, {7}),
        (..., [7, 8], {7, 8}),
        (5, [5, 7], {5, 7}),
        (5, None, {5}),
    ],
)
def test_any_listed_end_token_stops(gpt_oss, in_config, in_generation, expected):
    write_config(gpt_oss, GPT_OSS_CONFIG, eos_token_id=in_config)
    if in_generation is not ...:
        (gpt_oss / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation}))
    llm = LLM(str(gpt_oss), device="cpu")
    assert llm.scheduler.eos_ids == expected
    first = logits(llm.model).argmax().item()
    for token in expected:
        llm.model.head.weight.zero_()
        llm.model.head.weight[token] = 1e4 * torch.sign(llm.model.norm(torch.ones(32)))
        results = [
            llm.add([1, 2, 3], SamplingParams(max_new_tokens=3, temperature=0, ignore_eos=ignore)) for ignore in (0, 1)
        ]
        while llm.step():
            pass
        if results[0].token_ids[0] == token:
            assert results[0].finish_reason == "stop"
            assert len(results[0].token_ids) == 1
            assert results[1].finish_reason == "length"
    assert first < 64


@pytest.mark.parametrize("value", [64, -1, [5, 64], "5", 5.0, True, [[5]]])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_end_token_that_is_none(tmp_path, file, value):
    write_config(tmp_path, GPT_OSS_CONFIG, **({"eos_token_id": value} if file == "config.json" else {}))
    if file != "config.json":
        (tmp_path / file).write_text(json.dumps({"eos_token_id": value}))
    message = refusal(read_config, tmp_path)
    assert f"{tmp_path / file}: eos_token_id" in message
