"""Milliseconds a decode step of nano in the three modes: `python tutorials/measure_nano.py --out FILE`.

One request, in bfloat16 on CUDA, with each set of kernels that the device can run. The modes run one after the other,
each after a generation that captures what it needs; a step is timed from before `LLM.step` to after the device has
finished, and the median of all steps is kept.
"""

import argparse
import datetime
import json
import statistics
from pathlib import Path
from time import perf_counter

import torch
from train_nano import machine

from nanograph import LLM, SamplingParams
from nanograph.options import KERNELS, MODES

PARAMS = SamplingParams(temperature=0, max_new_tokens=200, ignore_eos=True)


def measure(kernels, mode, device):
    """Median milliseconds of a decode step, and what the CPU launches for one."""
    llm = LLM("nano", mode, device, kernels=kernels)
    llm.generate(["ROMEO:"], PARAMS)
    result, times = llm.add("ROMEO:", PARAMS), []
    while result.finish_reason is None:
        began = perf_counter()
        llm.step()
        if llm.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(perf_counter() - began)
    milliseconds = round(1e3 * statistics.median(times), 2)
    return {"kernels": kernels, "mode": mode, "milliseconds": milliseconds, "launches": llm.count_launches()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results") / "nano_decode.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    kernel_sets = KERNELS if args.device.startswith("cuda") else KERNELS[:1]
    rows = [measure(kernels, mode, args.device) for kernels in kernel_sets for mode in MODES]
    head = {"command": "python tutorials/measure_nano.py", "date": datetime.date.today().isoformat()}
    summary = {**head, "torch": torch.__version__, **machine(torch.device(args.device)), "rows": rows}
    args.out.write_text(json.dumps(summary, indent=1) + "\n")
    print(summary)


if __name__ == "__main__":
    main()
