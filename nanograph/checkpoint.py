"""From a folder of safetensors to a model: config.json says which model it is, a table says which tensor goes where.

nano, the checkpoint that ships with nanograph, is written in gpt-oss's format, so there is one loader for both. Config
values are read, never assumed; what is not supported is refused by name. Every parameter must be found, in its shape.

Read first: model.py. Read next: engine.py.
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from nanograph.model import GPT, Config, Rope

ASSETS = Path(__file__).with_name("assets")


def find_folder(model):
    """The checkpoint's folder for a model name or path. Raises ValueError where there is none."""
    folder = ASSETS if model == "nano" else Path(model)
    if not folder.is_dir():
        raise ValueError(f"unknown model {str(model)!r}: give nano, or a folder with config.json and safetensors")
    return folder


def read_json(path):
    """A JSON object from a file. Raises ValueError naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: a checkpoint folder needs it") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content


def read_config(folder):
    """The Config of a checkpoint folder. Raises ValueError for a missing or unsupported value, naming it."""
    raw = read_json(folder / "config.json")
    if raw.get("model_type") != "gpt_oss":
        raise ValueError(
            f"{folder / 'config.json'}: unknown architecture {raw.get('model_type')!r}: supported is gpt_oss"
        )
    try:
        return gpt_oss_config(raw)
    except KeyError as error:
        raise ValueError(f"{folder / 'config.json'} lacks {error}") from None


def read_dtype(folder):
    """The torch dtype that a checkpoint was saved in."""
    return getattr(torch, read_json(folder / "config.json")["dtype"])


def gpt_oss_config(raw):
    rope = raw["rope_parameters"]
    windows = {"sliding_attention": raw["sliding_window"], "full_attention": 0}
    eos = raw.get("eos_token_id")
    return Config(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        intermediate_size=raw["intermediate_size"],
        max_positions=raw["max_position_embeddings"],
        norm_eps=raw["rms_norm_eps"],
        rope=Rope(theta=rope["rope_theta"]),
        windows=tuple(windows[kind] for kind in raw["layer_types"]),
        num_experts=raw["num_local_experts"],
        experts_per_token=raw["num_experts_per_tok"],
        swiglu_limit=raw["swiglu_limit"],
        tie_embeddings=raw["tie_word_embeddings"],
        eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    )


def gpt_oss_sources(config):
    """Where each parameter comes from: our name -> names in the file, which are laid one below the other."""
    sources = {"embedding.weight": ["model.embed_tokens.weight"], "norm.weight": ["model.norm.weight"]}
    if not config.tie_embeddings:
        sources["head.weight"] = ["lm_head.weight"]
    for layer in range(config.num_layers):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        sources |= {
            ours + "attention_norm.weight": [theirs + "input_layernorm.weight"],
            ours + "attention.sinks": [theirs + "self_attn.sinks"],
            ours + "mlp_norm.weight": [theirs + "post_attention_layernorm.weight"],
            ours + "mlp.gate_up": [theirs + "mlp.experts.gate_up_proj"],
            ours + "mlp.gate_up_bias": [theirs + "mlp.experts.gate_up_proj_bias"],
            ours + "mlp.down": [theirs + "mlp.experts.down_proj"],
            ours + "mlp.down_bias": [theirs + "mlp.experts.down_proj_bias"],
        }
        for kind in ("weight", "bias"):
            sources |= {
                ours + f"qkv.{kind}": [theirs + f"self_attn.{name}_proj.{kind}" for name in "qkv"],
                ours + f"attention_output.{kind}": [theirs + f"self_attn.o_proj.{kind}"],
                ours + f"mlp.router.{kind}": [theirs + f"mlp.router.{kind}"],
            }
    return sources


def empty_model(config, ops, max_context, device, dtype):
    """A model whose parameters are allocated on `device`, not filled."""
    with torch.device("meta"):
        model = GPT(config, ops, max_context, device)
    model = model.to(dtype).to_empty(device=device).requires_grad_(False)
    if config.tie_embeddings:
        model.head.weight = model.embedding.weight
    return model


def random_model(config, ops, max_context, device, dtype, seed=0):
    """A model of the true shape with seeded random weights, drawn on the device."""
    model = empty_model(config, ops, max_context, device, dtype)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=0.02, generator=generator)
    return model


def load_model(folder, config, ops, max_context, device, dtype):
    """The model of a checkpoint folder. Raises ValueError naming the file and tensor that is missing, broken or
    misshapen."""
    model = empty_model(config, ops, max_context, device, dtype)
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ValueError(f"{path} is missing: a checkpoint folder needs it")
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            for name, sources in gpt_oss_sources(config).items():
                if missing := [source for source in sources if source not in names]:
                    raise ValueError(f"{path} lacks the tensor {missing[0]}")
                fill(
                    model.get_parameter(name),
                    [file.get_tensor(source) for source in sources],
                    name,
                    f"{path}: {sources[0]}",
                )
    except SafetensorError as error:
        raise ValueError(f"{path} is no complete safetensors file ({error}): download it again") from None
    return model


def fill(parameter, tensors, name, where):
    """Write the file's tensors into a parameter. gpt-oss stores experts as [expert, in, out]; ours are [expert, out,
    in]."""
    tensor = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    if name.endswith(("mlp.gate_up", "mlp.down")):
        tensor = tensor.transpose(1, 2)
    if tensor.shape != parameter.shape:
        raise ValueError(f"{where} has shape {list(tensor.shape)}, config.json asks for {list(parameter.shape)}")
    parameter.copy_(tensor)
