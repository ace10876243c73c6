"""Small models with seeded random weights, so that tests need no checkpoint, no GPU and no patience."""

import gc
import os

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports triton, as transformers does
    os.environ["TRITON_INTERPRET"] = "1"

from nanograph.checkpoint import random_model
from nanograph.kernels import reference
from nanograph.model import Config, Rope

NANO = Config(
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=16,
    max_positions=256,
    rope=Rope(theta=10000.0),
    windows=(16, 0),
    num_experts=4,
    experts_per_token=2,
)
GPT2 = Config(
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    intermediate_size=64,
    max_positions=256,
    norm="layer",
    sinks=False,
    tie_embeddings=True,
)
GPU = "cuda" if torch.cuda.is_available() else None


def make_model(config=NANO, device="cpu", dtype=torch.float32, scale=10.0):
    """A random model whose weights are `scale` times the usual size, so that its logits differ clearly between
    tokens."""
    model = random_model(config, reference, config.max_positions, torch.device(device), dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.mul_(scale)
    return model


@pytest.fixture(scope="session", autouse=True)
def _small_and_quick():
    """Each capture collects garbage once: what the imports have left need not be looked through every time. And the
    models are so small that threads would mostly wait for each other."""
    gc.freeze()
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    if GPU is None:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
