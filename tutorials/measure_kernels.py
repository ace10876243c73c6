"""The Triton kernels against their floors: `python tutorials/measure_kernels.py --out FILE`. Needs CUDA.

One layer of gpt-oss-20b and of -120b, random weights and tokens. A floor is the larger of two times: the bytes that
must cross device memory (the experts really touched) over 4.3 TB/s, and the operations over 790 TFLOP/s.
"""

import argparse
import datetime
import json
from pathlib import Path

import torch
import triton
from train_nano import machine

from nanograph.kernels import triton as kernels
from nanograph.kernels.reference import Mxfp4, route

BYTES, FLOPS = 4.3e12, 790e12  # a copy, and a bfloat16 product, on an H200
HIDDEN, TOP, HEADS, KV_HEADS, DIM = 2880, 4, 64, 8, 64


def milliseconds(function):
    return triton.testing.do_bench(function, warmup=5, rep=30, return_mode="median")


def random_weight(experts, outputs):
    blocks = torch.randint(0, 256, (experts, outputs, HIDDEN // 2), dtype=torch.uint8, device="cuda")
    return Mxfp4(blocks, torch.randint(119, 122, (experts, outputs, HIDDEN // 32), dtype=torch.uint8, device="cuda"))


def floor(num_bytes, flops):
    return 1e3 * max(num_bytes / BYTES, flops / FLOPS)


def experts_rows(name, num_experts):
    """Rows of the table for both products of the experts."""
    weights = {"gate_up": random_weight(num_experts, 2 * HIDDEN), "down": random_weight(num_experts, HIDDEN)}
    bias = torch.zeros(num_experts, 2 * HIDDEN, device="cuda", dtype=torch.bfloat16)
    down_bias = bias[:, :HIDDEN].contiguous()
    for tokens in (1, 16, 64, 512, 2048):
        x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        logits = torch.randn(tokens, num_experts, device="cuda")
        routing = route(logits, TOP, torch.tensor([tokens], dtype=torch.int32, device="cuda"))
        touched = int((routing.offsets.diff() > 0).sum())
        hidden = torch.randn(tokens * TOP, HIDDEN, device="cuda", dtype=torch.bfloat16)
        runs = {
            "gate_up": lambda: kernels.expert_gate_up(x, weights["gate_up"], bias, routing, 7.0),  # noqa: B023
            "down": lambda: kernels.expert_down(hidden, weights["down"], down_bias, routing),  # noqa: B023
        }
        for part, run in runs.items():
            outputs = weights[part].shape[1]
            num_bytes = touched * outputs * HIDDEN * 17 / 32 + 2 * tokens * TOP * (HIDDEN + outputs)
            yield [f"{name} {part}", tokens, milliseconds(run), floor(num_bytes, 2 * tokens * TOP * outputs * HIDDEN)]


def attention_rows():
    """One prompt, and one request decoding at a context of 4,096."""
    caches = [torch.randn(300, 16, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    sinks = torch.zeros(HEADS, device="cuda", dtype=torch.bfloat16)
    tables = torch.arange(1, 257, dtype=torch.int32, device="cuda").view(1, -1)
    for tokens, length in ((1, 4096), (16, 16), (64, 64), (512, 512), (2048, 2048), (4096, 4096)):
        q = torch.randn(tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        ends = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
        lengths = torch.tensor([length], dtype=torch.int32, device="cuda")
        arguments = (q, *caches, ends, lengths, tables, sinks, 0, DIM**-0.5, length)
        pairs = tokens * length - tokens * (tokens - 1) / 2
        num_bytes = 2 * (2 * tokens * HEADS * DIM + 2 * length * KV_HEADS * DIM)
        name = "attention, decode at 4,096" if tokens == 1 else "attention, prompt"
        run = milliseconds(lambda: kernels.paged_attention(*arguments))  # noqa: B023
        yield [name, tokens, run, floor(num_bytes, 4 * pairs * HEADS * DIM)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [*experts_rows("20b", 32), *experts_rows("120b", 128), *attention_rows()]
    for name, tokens, run, least in rows:
        print(f"{name:28} {tokens:5d} tokens {run:8.3f} ms, floor {least:7.3f} ms: {100 * least / run:3.0f} %")
    head = {"command": "python tutorials/measure_kernels.py", "date": datetime.date.today().isoformat()}
    head |= {"torch": torch.__version__, "triton": triton.__version__, **machine(torch.device("cuda"))}
    names = ("kernel", "tokens", "milliseconds", "floor")
    if args.out:
        table = [dict(zip(names, (name, tokens, round(run, 4), round(least, 4)))) for name, tokens, run, least in rows]
        args.out.write_text(json.dumps(head | {"rows": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
