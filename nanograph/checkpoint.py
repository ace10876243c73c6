"""From a checkpoint, a folder of safetensors, to a model: config.json says which, a table says which tensor goes where.

Three kinds are read: GPT-2, and gpt-oss with its experts in bfloat16 or, as published, in MXFP4. nano, the checkpoint
that ships with nanograph, is a small gpt-oss. Three rules hold throughout:

- values are read, never assumed, and one that this engine does not compute is refused by name;
- every tensor is accounted for before the first is read: each in the files is used or known to be no weight, each
  parameter is filled once, in its shape;
- the model is in memory once: parameters are allocated empty, and filled from files that are mapped, not read.

Left out: other architectures, pickled weights (.bin), vocabularies (see tokenizer.py).

Read first: model.py. Read next: engine.py.
"""

import json
import math
import re
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from nanograph.kernels.reference import Mxfp4, decode_mxfp4
from nanograph.model import GPT, Config, Rope

ASSETS = Path(__file__).with_name("assets")
FILES = ["config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json"]
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # as safetensors and as torch call them
EMBEDDING = re.compile(r"(.*\.)?(wte|embed_tokens|lm_head)\.weight")
CAUSAL_MASK = re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias")  # in older files of GPT-2
# What is larger in a config.json is a mistake, and nothing of that size must be allocated.
MAX_SIZE, MAX_LAYERS, MAX_POSITIONS = 2**19, 1000, 2**24
LAYER_TYPES = ("sliding_attention", "full_attention")


def find_folder(model, random_weights=None):
    """A checkpoint's folder: "nano", a path, or a repository of Hugging Face, which is downloaded.

    random_weights: a name of options.RANDOM_WEIGHTS, for a shipped folder that has the published config.json, and no
    weights. Raises ValueError where there is none.
    """
    if random_weights not in (None, "nano"):
        return ASSETS / random_weights
    folder = ASSETS if model == "nano" else Path(str(model))
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(model)):
        raise ValueError(f"unknown model {str(model)!r}: give nano, or a folder with config.json and safetensors")
    try:
        from huggingface_hub import snapshot_download

        # not what lies in inner folders: there gpt-oss has its weights in other formats
        return Path(snapshot_download(str(model), allow_patterns=FILES, ignore_patterns=["*/*"]))
    except Exception as error:  # whatever the network stack of the day raises
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        how = "pip install nanograph[hub]" if isinstance(error, ImportError) else reason
        raise ValueError(f"no folder {model}, and it cannot be downloaded: {how}") from None


# What config.json says


def read_json(path):
    """A JSON object from a file. Raises ValueError naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}, which a checkpoint needs, cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content


class Fields:
    """The values of a JSON object, checked as they are read. Refusals are ValueErrors that name the file and the key.

    where: the file. null is the same as absence; a value without a default must be there.
    """

    def __init__(self, values, where):
        self.values, self.where = values, where

    def refuse(self, key, wanted):
        found = "missing" if self.values.get(key) is None else repr(self.values[key])[:80]
        raise ValueError(f"{self.where}: {key} must be {wanted}, but is {found}")

    def get(self, key, kind, default=...):
        value = self.values.get(key)
        if value is None and default is not ...:
            return default
        if type(value) not in ((int, float) if kind is float else (kind,)):
            self.refuse(key, f"of type {kind.__name__}")
        if kind is float and not 0 < value < 1e38:
            self.refuse(key, "a number above 0")
        return value

    def size(self, key, default=..., most=MAX_SIZE, step=1):
        value = self.get(key, int, default)
        if value not in range(step, most + 1, step):
            self.refuse(key, f"from {step} to {most}, a multiple of {step}")
        return value

    def inner(self, key):
        return Fields(self.get(key, dict, {}), f"{self.where}: {key}")

    def only(self, key, *supported):
        """Refuse what the engine does not compute. The first value supported is also what absence means."""
        value = supported[0] if self.values.get(key) is None else self.values[key]
        if value not in supported:
            self.refuse(key, " or ".join(map(repr, supported)))
        return value


def read_config(folder):
    """The Config of a checkpoint folder. Raises ValueError for a missing or unsupported value, naming it."""
    path, more = folder / "config.json", folder / "generation_config.json"
    fields = Fields(read_json(path), path)
    fields.get("model_type", str)
    read = gpt2_config if fields.only("model_type", "gpt2", "gpt_oss") == "gpt2" else gpt_oss_config
    config = read(fields.values, path)
    ids = eos_ids(Fields(read_json(more), more), config.vocab_size) if more.exists() else ()
    return replace(config, eos_ids=(*config.eos_ids, *ids))


def eos_ids(fields, vocab_size):
    """The tokens that end a text: eos_token_id is one, a list or null. Those of both files count."""
    value = fields.values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        fields.refuse("eos_token_id", f"in the vocabulary, from 0 to {vocab_size - 1}")
    return tuple(ids)


def gpt2_config(raw, where):
    """The Config of a GPT-2, whose keys are those of https://huggingface.co/openai-community/gpt2."""
    fields = Fields(raw, where)
    fixed = {"activation_function": "gelu_new", "scale_attn_weights": True, "quantization_config": None}
    fixed |= {"scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False, "add_cross_attention": False}
    for key, value in fixed.items():
        fields.only(key, value)
    heads = fields.size("n_head")
    hidden_size = fields.size("n_embd", step=heads)
    return Config(
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        num_layers=fields.size("n_layer", most=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden_size // heads,
        intermediate_size=fields.size("n_inner", 4 * hidden_size, most=4 * MAX_SIZE),
        max_positions=fields.size("n_positions", most=MAX_POSITIONS),
        norm="layer",
        norm_eps=fields.get("layer_norm_epsilon", float),
        sinks=False,
        tie_embeddings=fields.get("tie_word_embeddings", bool, True),
        eos_ids=eos_ids(fields, fields.size("vocab_size")),
    )


def gpt_oss_config(raw, where="config.json"):
    """The Config of a gpt-oss, whose keys are those of https://huggingface.co/openai/gpt-oss-20b."""
    fields = Fields(raw, where)
    for key, value in {"hidden_act": "silu", "attention_bias": True, "swiglu_alpha": 1.702}.items():
        fields.only(key, value)
    fields.inner("quantization_config").only("quant_method", "mxfp4")
    mxfp4, experts = raw.get("quantization_config") is not None, fields.size("num_local_experts")
    block = 32 if mxfp4 else 1  # values that share a scale
    return Config(
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size", step=block),
        num_layers=fields.size("num_hidden_layers", most=MAX_LAYERS),
        num_heads=fields.size("num_attention_heads", step=fields.size("num_key_value_heads")),
        num_kv_heads=fields.size("num_key_value_heads"),
        head_dim=fields.size("head_dim", step=2),
        intermediate_size=fields.size("intermediate_size", step=block),
        max_positions=fields.size("max_position_embeddings", most=MAX_POSITIONS),
        norm_eps=fields.get("rms_norm_eps", float),
        rope=read_rope(fields),
        windows=read_windows(fields),
        num_experts=experts,
        experts_per_token=fields.size("num_experts_per_tok", most=experts),
        mxfp4=mxfp4,
        swiglu_limit=fields.get("swiglu_limit", float, 7.0),
        tie_embeddings=fields.get("tie_word_embeddings", bool, False),
        eos_ids=eos_ids(fields, fields.size("vocab_size")),
    )


def read_rope(fields):
    """Rotary positions: `rope_parameters` (transformers 5), or `rope_scaling` beside `rope_theta`."""
    rope = fields.inner("rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters")
    rope.only("partial_rotary_factor", 1.0)
    for key in LAYER_TYPES:  # transformers can hold one rotation for each
        rope.only(key, None)
    theta = rope.get("rope_theta", float, None) or fields.get("rope_theta", float)
    if theta <= 1:
        raise ValueError(f"{rope.where}: rope_theta must be above 1, but is {theta}")
    if rope.only("rope_type" if "rope_type" in rope.values else "type", "default", "yarn") == "default":
        return Rope(theta)
    factor, attention_factor = rope.get("factor", float), rope.get("attention_factor", float, None)
    mscales = [rope.get("mscale", float, None), rope.get("mscale_all_dim", float, None)]
    if attention_factor is None and all(mscales):
        over, under = (0.1 * mscale * math.log(max(factor, 1.0)) + 1.0 for mscale in mscales)
        attention_factor = over / under
    original = rope.size("original_max_position_embeddings", most=MAX_POSITIONS)
    betas = rope.get("beta_fast", float, 32.0), rope.get("beta_slow", float, 1.0)
    return Rope(theta, factor, original, *betas, rope.get("truncate", bool, True), attention_factor)


def read_windows(fields):
    """Config.windows, from layer_types and sliding_window."""
    kinds = fields.get("layer_types", list)
    if len(kinds) != fields.size("num_hidden_layers"):
        fields.refuse("layer_types", "a list of num_hidden_layers names")
    for kind in kinds:
        if kind not in LAYER_TYPES:
            raise ValueError(f"{fields.where}: layer_types {kind!r:.80} is not supported, only {LAYER_TYPES}")
    window = fields.size("sliding_window", most=MAX_POSITIONS) if "sliding_attention" in kinds else 0
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def read_dtype(folder):
    """The torch dtype of a checkpoint: as config.json says or, where it does not (GPT-2's), that of the embedding."""
    fields = Fields(read_json(folder / "config.json"), folder / "config.json")
    for key in ("dtype", "torch_dtype"):
        if fields.values.get(key) is not None:
            return getattr(torch, fields.only(key, *DTYPES.values()))
    with open_shards(folder) as tensors:
        stored = [file.get_slice(name).get_dtype() for name, (_, file) in tensors.items() if EMBEDDING.fullmatch(name)]
    return getattr(torch, DTYPES.get(stored[0], "float32") if stored else "float32")


def choose_dtype(asked, saved, config, device):
    """The dtype to compute in. asked: a name of options.DTYPES or None; saved: the checkpoint's, a torch.dtype.

    Cards of a compute capability below 8.0 have no bfloat16. float16 takes its place there, but not for gpt-oss as
    published, whose activations exceed its range: ValueError. Such cards have not been tried: what is tested is the
    choice.
    """
    dtype = getattr(torch, asked) if asked else torch.float32 if device.type == "cpu" else saved
    if device.type == "cpu" or dtype == torch.float32 or torch.cuda.get_device_capability(device) >= (8, 0):
        return dtype
    if config.mxfp4 or (config.num_experts and config.hidden_size >= 2880):
        raise ValueError(f"{device} has no bfloat16, and gpt-oss exceeds the range of float16: use dtype float32")
    if dtype == torch.bfloat16:
        print(f"{device} has no bfloat16: computing in float16", file=sys.stderr)
    return torch.float16


# Which tensor goes where


def gpt_oss_places(model, packed_file=False):
    """What each tensor of a gpt-oss fills: {name in the file: view of a parameter, in the layout of the file}.

    Experts are stored as [expert, in, out]. In a packed file they are `_blocks` [E, out, in / 32, 16] and `_scales`
    [E, out, in / 32]; where the model's are not packed, their views have the 32 values of a block, and the first.
    """
    config, places = model.config, {"model.embed_tokens.weight": model.embedding.weight}
    places |= {"lm_head.weight": model.head.weight, "model.norm.weight": model.norm.weight}
    rows = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    for layer, block in enumerate(model.blocks):
        prefix = f"model.layers.{layer}."
        places[prefix + "input_layernorm.weight"] = block.attention_norm.weight
        places[prefix + "self_attn.sinks"] = block.attention.sinks
        places[prefix + "post_attention_layernorm.weight"] = block.mlp_norm.weight
        for kind in ("weight", "bias"):
            for name, part in zip("qkv", getattr(block.qkv, kind).split(rows)):
                places[prefix + f"self_attn.{name}_proj.{kind}"] = part
            places[prefix + f"self_attn.o_proj.{kind}"] = getattr(block.attention_output, kind)
            places[prefix + f"mlp.router.{kind}"] = getattr(block.mlp.router, kind)
        for ours, weight in block.mlp.named_parameters(recurse=False):
            name = prefix + "mlp.experts." + re.sub("gate_up|down", r"\g<0>_proj", ours)
            if ours not in ("gate_up", "down"):  # biases, and what is packed on both sides
                places[name] = weight
            elif packed_file:
                blocks = weight.unflatten(-1, (-1, 32))
                places |= {f"{name}_blocks": blocks, f"{name}_scales": blocks[..., 0]}
            else:
                places[name] = weight.mT
    return places


def gpt2_places(model, prefix):
    """The same for GPT-2, which stores weights as [in, out] (Conv1D). prefix: "transformer." or "", at its writer's
    choice."""
    names = {"attention_norm": "ln_1", "qkv": "attn.c_attn", "attention_output": "attn.c_proj"}
    names |= {"mlp_norm": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    places = {prefix + "wte.weight": model.embedding.weight, "lm_head.weight": model.head.weight}
    places[prefix + "wpe.weight"] = model.positions.weight
    places |= {f"{prefix}ln_f.{kind}": parameter for kind, parameter in model.norm.named_parameters()}
    for layer, block in enumerate(model.blocks):
        for ours, theirs in names.items():
            for kind, parameter in block.get_submodule(ours).named_parameters():
                places[f"{prefix}h.{layer}.{theirs}.{kind}"] = parameter.mT if parameter.ndim == 2 else parameter
    return places


def places_for(model, tensors, packed_file):
    """What the tensors of a checkpoint fill. A tied head may go by its own name, by the embedding's, or by both."""
    prefix = "transformer." if any(name.startswith("transformer.") for name in tensors) else ""
    places = gpt_oss_places(model, packed_file) if model.config.num_experts else gpt2_places(model, prefix)
    embedding, head, *_ = places
    if model.config.tie_embeddings and (embedding in tensors) != (head in tensors):
        del places[head if embedding in tensors else embedding]
    return places


# The files


def list_shards(folder):
    """The files that hold the weights. Raises ValueError, before one is opened, if one is missing."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ValueError(f"{single} is missing, and so is {index.name}: a checkpoint folder needs one of them")
    paths = [folder / str(name) for name in Fields(read_json(index), index).get("weight_map", dict).values()]
    for path in paths:
        if path.parent != folder or not path.is_file():
            raise ValueError(f"{index}: {path} is missing, or outside of this folder: download it again")
    return sorted(set(paths))


@contextmanager
def open_shards(folder):
    """All tensors of a checkpoint, from the headers of its files: {name: (path, open file)}."""
    tensors = {}
    with ExitStack() as stack:
        for path in list_shards(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                advice = "download it again, from Git with git lfs pull"
                raise ValueError(f"{path} is no complete safetensors file ({error}): {advice}") from None
            for name in file.keys():  # noqa: SIM118 - it is no dict
                if name in tensors:
                    raise ValueError(f"{path} holds the tensor {name}, and so does {tensors[name][0]}")
                tensors[name] = (path, file)
        yield tensors


def check_tensors(places, tensors, config, folder):
    """Account for every tensor. Raises ValueError for one that is missing, unknown, or of another shape or type."""
    if missing := [name for name in places if name not in tensors]:
        raise ValueError(f"{folder} lacks {len(missing)} tensors: {', '.join(missing[:3])}")
    for name, (path, file) in tensors.items():
        if CAUSAL_MASK.fullmatch(name):
            continue
        if name not in places:
            raise ValueError(f"{path} holds the tensor {name}, which has no place in the model of config.json")
        stored, shape = file.get_slice(name), list(places[name].shape)
        shape = [*shape[:-1], 16] if name.endswith("_blocks") else shape
        if stored.get_shape() != shape:
            raise ValueError(f"{path}: {name} has shape {stored.get_shape()}, config.json asks for {shape}")
        if stored.get_dtype() not in (["U8"] if name.endswith(("_blocks", "_scales")) else DTYPES):
            raise ValueError(f"{path}: {name} has dtype {stored.get_dtype()}, which is not supported")
    embedding, second, *_ = places
    if config.tie_embeddings and second == "lm_head.weight":
        one, other = (tensors[name][1].get_tensor(name).float() for name in (embedding, second))
        if not torch.equal(one, other):
            raise ValueError(f"{folder}: {embedding} and {second} differ, but config.json ties them")


# The model


def can_stay_packed(device):
    """Whether a kernel computes with MXFP4 as it is: on CUDA, with Triton. Elsewhere it is decoded once."""
    return device.type == "cuda" and find_spec("triton") is not None


def model_without_memory(config, ops, max_context, device, dtype):
    """The model for a device, its parameters on torch's meta device: shapes without memory."""
    with torch.device("meta"):
        config = replace(config, mxfp4=config.mxfp4 and can_stay_packed(device))
        return GPT(config, ops, max_context, device).to(dtype).requires_grad_(False)


def allocate(model, device):
    """Give the parameters memory on `device`, unfilled. Raises ValueError where there is too little."""
    needed, available = sum(parameter.nbytes for parameter in model.parameters()), free_memory(device)
    if needed > available:
        figures = f"{needed / 1e9:.1f} GB are needed, {available / 1e9:.1f} GB are available"
        raise ValueError(f"not enough memory on {device} for the weights in {model.norm.weight.dtype}: {figures}")
    empty = {old: torch.empty(old.shape, dtype=old.dtype, device=device) for old in model.parameters()}
    empty = {old: torch.nn.Parameter(new, requires_grad=False) for old, new in empty.items()}
    for module in model.modules():  # and not model.to_empty, which imports for a second and unties the head
        for name, old in module.named_parameters(recurse=False):
            setattr(module, name, empty[old])


def free_memory(device):
    """Bytes that can still be allocated; infinity where the system does not say."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    path = Path("/proc/meminfo")
    return 1024 * int(path.read_text().split("MemAvailable:")[1].split()[0]) if path.exists() else math.inf


def load_model(folder, config, ops, max_context, device, dtype):
    """The model of a checkpoint folder. Raises ValueError naming the file and the tensor that is missing, broken,
    misshapen or unknown, and where memory is short."""
    model = model_without_memory(config, ops, max_context, device, dtype)
    with open_shards(folder) as tensors:
        check_tensors(places_for(model, tensors, config.mxfp4), tensors, config, folder)
        allocate(model, device)
        if config.mxfp4 and not model.config.mxfp4:
            size = sum(parameter.nbytes for parameter in model.parameters()) / 1e9
            print(f"MXFP4 stays packed on CUDA with Triton only: decoding to {size:.1f} GB of {dtype}", file=sys.stderr)
        for name, view in tqdm(places_for(model, tensors, config.mxfp4).items(), "loading", leave=False, delay=1):
            fill(view, name, lambda name: tensors[name][1].get_tensor(name))
    return model


def fill(view, name, read):
    """Write the tensor `name`, as `read` reads it, into its place. Packed experts are decoded there one by one."""
    if view.dtype == torch.uint8 or not name.endswith(("_blocks", "_scales")):
        view.copy_(read(name).to(view.device))
    elif name.endswith("_blocks"):
        for values, *packed in zip(view, read(name).flatten(-2), read(name.replace("_blocks", "_scales"))):
            packed = Mxfp4(*(part.to(view.device) for part in packed))
            values.copy_(decode_mxfp4(packed, view.dtype).view_as(values))


def random_model(config, ops, max_context, device, dtype, seed=0):
    """A model of any shape with seeded random weights, drawn in place on the device. Raises ValueError where memory is
    short.

    A matrix of normal numbers times 0.02 keeps the size of its input where that is about 2,500 wide; so do random MXFP4
    codes, whose root mean square is 2.9, with scales about 2**-7.
    """
    model = model_without_memory(config, ops, max_context, device, dtype)
    allocate(model, device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif parameter.dtype == torch.uint8:
            parameter.random_(*((119, 122) if name.endswith("_scales") else (0, 256)), generator=generator)
        else:
            parameter.normal_(std=0.02, generator=generator)
    return model
