"""Our logits are transformers', for checkpoints that transformers itself has written: max |Δ| < 1e-4 x max |logit|.

The checkpoints are small and random. Their weights are larger than usual ones, so that what distinguishes one variant
of an operation from another (which GELU, which rotation) shows; that it does is tested too.
"""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from nanograph import LLM
from nanograph.model import MLP

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

GPT2 = {"vocab_size": 96, "n_positions": 64, "n_embd": 48, "n_layer": 3, "n_head": 4, "eos_token_id": 95}
GPT_OSS = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 3,  # not a multiple of the pair that alternates
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "eos_token_id": 95,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
PROMPT_LENGTH = 40
WHOLE = 64  # more tokens than PROMPT_LENGTH: the prompt in one step


def gpt2(scale=5.0, kind=transformers.GPT2LMHeadModel, **changes):
    """A random GPT-2 of transformers, its weights `scale` times the usual size."""
    torch.manual_seed(0)
    model = kind(transformers.GPT2Config(**{**GPT2, **changes}, attn_implementation="eager")).eval()
    return enlarge(model, scale)


def gpt_oss(scale=8.0, **changes):
    """A random gpt-oss of transformers. Its sinks lie far from zero."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**{**GPT_OSS, **changes}, attn_implementation="eager")
    model = enlarge(transformers.GptOssForCausalLM(config).eval(), scale)
    for layer in model.model.layers:
        layer.self_attn.sinks.data = torch.linspace(-6.0, 9.0, config.num_attention_heads)
    return model


@torch.no_grad()
def enlarge(model, scale):
    """Random weights of standard deviation 0.02 x scale, biases and norms included."""
    for name, parameter in model.named_parameters():
        parameter.normal_(mean=1.0 if "norm" in name or ".ln_" in name else 0.0, std=0.02 * scale)
    return model


def save(model, folder, dtype=torch.float32):
    """Write a checkpoint in `dtype`, and give the model the values that are in it, to compute with in float32."""
    for parameter in model.parameters():  # not model.to(dtype): that would round the rotation's frequencies
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(folder)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()


def token_ids(length, vocab_size=96):
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@torch.no_grad()
def our_logits(folder, prompt, chunk=WHOLE, **options):
    """Logits of every position, [len(prompt), vocab], computed `chunk` tokens a step in float32."""
    llm = LLM(folder, mode="eager", device="cpu", max_batch_tokens=chunk, max_requests=1, **options)
    request, rows = llm.add(prompt)._request, []
    while request.num_computed < len(prompt):
        scheduled = llm.scheduler.schedule()
        llm.batch.fill(scheduled)
        rows.append(llm.model.head(llm.model.norm(llm.model.hidden_states(llm.batch))))
        torch.testing.assert_close(llm.executor.run()[0], rows[-1][-1], rtol=1e-4, atol=1e-4)
        llm.scheduler.update(scheduled, [])
    return torch.cat(rows)


def difference(ours, oracle, prompt):
    """max |Δ| / max |logit| over all positions."""
    with torch.no_grad():
        expected = oracle(torch.tensor([prompt])).logits[0]
    assert expected.isfinite().all()
    return ((ours - expected).abs().max() / expected.abs().max()).item()


def edit_json(path, **changes):
    """Change a JSON file; the value ... removes a key."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


# GPT-2


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gpt2(tmp_path, dtype, tied):
    model = gpt2(tie_word_embeddings=tied, n_inner=None if tied else 80)
    save(model, tmp_path, dtype)
    prompt = token_ids(PROMPT_LENGTH)
    assert difference(our_logits(tmp_path, prompt), model, prompt) < 1e-4


def test_gpt2_without_prefix(tmp_path):
    """As the published files are: written by GPT2Model, which has no head, with the causal mask among the weights."""
    model = gpt2()
    save(model.transformer, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "wte.weight" in tensors
    for layer in range(GPT2["n_layer"]):
        tensors[f"h.{layer}.attn.bias"] = torch.tril(torch.ones(1, 1, 64, 64))
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, tmp_path / "model.safetensors")
    prompt = token_ids(PROMPT_LENGTH)
    assert difference(our_logits(tmp_path, prompt), model, prompt) < 1e-4


def test_gpt2_up_to_its_last_position(tmp_path):
    model = gpt2()
    save(model, tmp_path)
    prompt = token_ids(63)
    assert difference(our_logits(tmp_path, prompt, chunk=17), model, prompt) < 1e-4


def test_another_gelu_is_seen(tmp_path, monkeypatch):
    model = gpt2()
    save(model, tmp_path)
    monkeypatch.setattr(MLP, "forward", lambda self, x, batch: self.down(F.gelu(self.up(x))))
    prompt = token_ids(PROMPT_LENGTH)
    assert difference(our_logits(tmp_path, prompt), model, prompt) > 1e-4


def test_one_matrix_not_transposed_is_seen(tmp_path):
    """attn.c_proj is square, so no shape tells."""
    model = gpt2()
    save(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "transformer.h.1.attn.c_proj.weight"
    tensors[name] = tensors[name].T.contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    prompt = token_ids(PROMPT_LENGTH)
    assert difference(our_logits(tmp_path, prompt), model, prompt) > 1e-2


# gpt-oss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, {"num_experts_per_tok": 6}, {"sliding_window": 1}]
)
def test_gpt_oss(tmp_path, changes, dtype):
    model = gpt_oss(**changes)
    save(model, tmp_path, dtype)
    prompt = token_ids(PROMPT_LENGTH)
    assert difference(our_logits(tmp_path, prompt), model, prompt) < 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"truncate": False},
        {"factor": 32.0, "beta_fast": 4.0, "beta_slow": 0.5},
        {"attention_factor": 1.7},
        {"mscale": 0.7, "mscale_all_dim": 1.2},
        {"factor": 1.0, "attention_factor": 0.8},
        {"original_max_position_embeddings": 6},  # the ramp is empty: both of its ends are dimension 0
        {"original_max_position_embeddings": 1},  # its upper end lies below the lower one
    ],
)
def test_yarn(tmp_path, changes):
    model = gpt_oss(rope_parameters={**YARN, **changes})
    save(model, tmp_path)
    prompt = token_ids(200)  # past the original 64 positions
    assert difference(our_logits(tmp_path, prompt, chunk=128), model, prompt) < 1e-4


def test_how_yarn_truncates_is_seen(tmp_path):
    model = gpt_oss(rope_parameters={**YARN, "truncate": False})
    save(model, tmp_path)
    edit_json(tmp_path / "config.json", rope_parameters={**YARN, "truncate": True})
    prompt = token_ids(200)
    assert difference(our_logits(tmp_path, prompt, chunk=128), model, prompt) > 1e-4


def test_older_names_in_config(tmp_path):
    """transformers 4 has rope_scaling and rope_theta, and torch_dtype; the published gpt-oss also "type"."""
    model = gpt_oss(rope_parameters={**YARN, "truncate": False})
    save(model, tmp_path)
    scaling = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False}
    older = {
        "rope_parameters": ...,
        "rope_scaling": scaling,
        "rope_theta": 10000,
        "dtype": ...,
        "torch_dtype": "float32",
    }
    edit_json(tmp_path / "config.json", **older, swiglu_limit=..., swiglu_alpha=...)
    prompt = token_ids(100)
    assert difference(our_logits(tmp_path, prompt), model, prompt) < 1e-4


def test_past_the_published_window_and_original_positions(tmp_path):
    """gpt-oss's own window of 128 and YaRN of 4,096 positions, the prompt longer than both."""
    yarn = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    model = gpt_oss(
        rope_parameters={**yarn, "truncate": False},
        max_position_embeddings=131072,
        sliding_window=128,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    save(model, tmp_path)
    prompt = token_ids(4200)
    assert difference(our_logits(tmp_path, prompt, chunk=1024), model, prompt) < 1e-4


@pytest.mark.parametrize("chunk", [1, 7, 16, 17, WHOLE])
@pytest.mark.parametrize("make", [gpt2, gpt_oss])
def test_a_prompt_in_chunks(tmp_path, make, chunk):
    model = make()
    save(model, tmp_path)
    prompt = token_ids(PROMPT_LENGTH)
    assert difference(our_logits(tmp_path, prompt, chunk), model, prompt) < 1e-4


# MXFP4


def pack_experts(model, folder):
    """Give the experts of a saved gpt-oss random MXFP4 weights, in the published format; `model` gets their values, as
    transformers decodes them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for layer, block in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            parameter = getattr(block.mlp.experts, name)
            experts, columns, rows = parameter.shape
            blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(118, 125, blocks.shape[:-1], dtype=torch.uint8, generator=generator)
            parameter.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            del tensors[f"model.layers.{layer}.mlp.experts.{name}"]
            tensors[f"model.layers.{layer}.mlp.experts.{name}_blocks"] = blocks
            tensors[f"model.layers.{layer}.mlp.experts.{name}_scales"] = scales
    save_file(tensors, folder / "model.safetensors")
    edit_json(folder / "config.json", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": []})


@pytest.mark.parametrize("chunk", [1, WHOLE])
def test_mxfp4(tmp_path, capsys, chunk):
    model = gpt_oss()
    save(model, tmp_path, torch.bfloat16)
    pack_experts(model, tmp_path)
    prompt = token_ids(PROMPT_LENGTH)
    assert difference(our_logits(tmp_path, prompt, chunk), model, prompt) < 1e-4
    [line] = capsys.readouterr().err.splitlines()
    assert "MXFP4" in line
    assert "torch.float32" in line
