"""Generate text: `python -m nanograph.generate --mode breakable --prompt "ROMEO:"`.

Standard output carries the completion and nothing else; what is said about it goes to standard error. Arguments are
checked before torch is loaded. The other command lines (diff, bench, trace) take their engine arguments from here.

Read first: engine.py.
"""

import argparse
import os
import sys
import warnings
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

from nanograph.options import BREAKS, DTYPES, KERNELS, MODES, RANDOM_WEIGHTS, EngineOptions, SamplingParams


def one_line(message):
    """A message as one line, also where it quotes a file name of two."""
    return " ".join(str(message).splitlines())


class CommandLine(argparse.ArgumentParser):
    """An ArgumentParser whose complaints are one line."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {one_line(message)}\n")


def add_engine_arguments(parser, several=False):
    """The options of EngineOptions that command lines share. several: --modes and --kernels, which take lists."""
    group = parser.add_argument_group("engine")
    group.add_argument("--model", default="nano", help="nano, a folder, or a Hugging Face repository (default: nano)")
    group.add_argument("--random-weights", choices=RANDOM_WEIGHTS, help="a published shape, without its weights")
    if several:
        group.add_argument("--modes", default=",".join(MODES), help="as eager,full (default: all three)")
        group.add_argument("--kernels", help=f"as {','.join(KERNELS)} (default: the fastest)")
    else:
        group.add_argument("--mode", choices=MODES, default="breakable", help="how steps run (default: breakable)")
        group.add_argument("--kernels", choices=KERNELS, help="default: the fastest that the device can run")
    group.add_argument(
        "--breaks",
        default="attention",
        help=f"operations that run between segments: {', '.join(BREAKS)}, or all (default: attention)",
    )
    group.add_argument("--buckets", help="token counts to capture, as 64,256 (default: up to --max-batch-tokens)")
    group.add_argument("--max-batch-tokens", type=int, default=2048, help="most tokens of one step (default: 2048)")
    group.add_argument("--max-context", type=int, help="most tokens of a request (default: the model's, up to 8192)")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    group.add_argument("--dtype", choices=DTYPES, help="default: float32 on the CPU, the checkpoint's own on CUDA")
    group.add_argument(
        "--capture", choices=("lazy", "ahead"), default="lazy", help="capture on first use or before (default: lazy)"
    )


def from_arguments(kind, args):
    """An EngineOptions or SamplingParams from the parsed arguments of the same names. Raises ValueError."""
    return kind(**{field.name: getattr(args, field.name) for field in fields(kind) if hasattr(args, field.name)})


def open_llms(args, **changes):
    """An LLM for each kernel set and mode of arguments that take several, the modes over one copy of the weights.

    changes: options that the command line sets itself. Raises ValueError.
    """
    several = product(args.kernels.split(",") if args.kernels else [None], args.modes.split(","))
    chosen = [argparse.Namespace(**{**vars(args), "kernels": kernels, "mode": mode}) for kernels, mode in several]
    options = [replace(from_arguments(EngineOptions, one), **changes) for one in chosen]

    from nanograph.engine import LLM

    llms = []
    for one in options:
        owner = next((llm for llm in llms if llm.options.kernels == one.kernels), None)
        llms.append(LLM(**vars(replace(one, model=owner.model) if owner else one)))
    return llms


def parse_arguments(argv):
    parser = CommandLine("python -m nanograph.generate", description="Generate text.")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", action="append", help="a prompt; may be given several times (default: ROMEO:)")
    prompts.add_argument("--prompt-file", help="a UTF-8 file with one prompt; - for standard input")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-new-tokens", type=int, default=200, help="most tokens to generate (default: 200)")
    sampling.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default: 0.8)")
    sampling.add_argument("--top-k", type=int, help="draw from the k likeliest tokens (default: all)")
    sampling.add_argument("--top-p", type=float, default=0.9, help="of those, this probability's (default: 0.9)")
    sampling.add_argument("--seed", type=int, help="the same seed draws the same text (default: a new one each time)")
    sampling.add_argument("--stop", action="append", default=[], help="end at this string; may be given several times")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on past the model's end-of-text token")
    add_engine_arguments(parser)
    parser.add_argument("--chat", action="store_true", help="the prompt is a message to gpt-oss (harmony format)")
    parser.add_argument("--stats", action="store_true", help="say on standard error what the engine did")
    parser.add_argument("--explain", action="store_true", help="say on standard error what the captured graphs hold")
    return parser.parse_args(argv)


def read_prompts(args):
    """The prompts to complete. Raises ValueError for a file that is missing or not UTF-8, or an empty prompt."""
    prompts = args.prompt or ["ROMEO:"]
    if args.prompt_file is not None:
        try:
            data = sys.stdin.buffer.read() if args.prompt_file == "-" else Path(args.prompt_file).read_bytes()
            prompts = [data.decode("utf-8")]
        except OSError as error:
            raise ValueError(f"cannot read the prompt file {args.prompt_file}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"the prompt file {args.prompt_file} is not UTF-8 (byte {error.start})") from None
    return prompts


def frame_as_chat(llm, prompts):
    """Prompts as messages to gpt-oss, which then ends where the format ends and shows its marks, as <|channel|>.

    Returns lists of token ids. Raises ValueError for another model: it does not know the format.
    """
    from nanograph.tokenizer import KNOWN

    if KNOWN.get(llm.config.vocab_size) != "o200k_harmony":
        raise ValueError("--chat is for gpt-oss: this model was not trained on chats")
    ends = llm.tokenizer.special_ids("<|return|>", "<|call|>")
    llm.tokenizer.hidden_ids = ends
    llm.scheduler.eos_ids |= ends
    return list(map(llm.tokenizer.encode_chat, prompts))


def print_stats(llm):
    """What the engine did, on standard error."""
    stats = llm.stats
    lines = [f"{stats.steps} steps: {stats.captures} captured, {stats.replays} replayed, {stats.eager_steps} eager"]
    for kind, steps in sorted(stats.steps_by_kind.items()):
        rate = stats.tokens_by_kind[kind] / stats.seconds_by_kind[kind]
        lines.append(f"{kind}: {steps} steps, {stats.tokens_by_kind[kind]} tokens, {rate:,.0f} tokens/s with captures")
    lines.append(f"padded rows {stats.padded_rows}, breaks run {stats.breaks_run}, graph bytes {stats.graph_bytes:,}")
    lines.append(f"launches to compute the last step: {llm.count_launches()} (sampling excepted)")
    print("\n".join(lines), file=sys.stderr)


def write(text):
    sys.stdout.write(text)
    sys.stdout.flush()


def run(args):
    """Complete the prompts and print them. Raises ValueError for what cannot be done, after doing the rest."""
    params, options, prompts = (
        from_arguments(SamplingParams, args),
        from_arguments(EngineOptions, args),
        read_prompts(args),
    )
    if not any(prompts):
        raise ValueError("prompt is empty: give at least one character")

    from nanograph.engine import LLM  # torch: from here on it takes a second
    from nanograph.explain import explain

    llm = LLM(**vars(options))
    prompts = frame_as_chat(llm, prompts) if args.chat else prompts
    try:
        if len(prompts) == 1:
            for result in llm.stream(prompts, params):
                write(result.new_text())
            write("\n")
        else:
            print_in_order(llm, prompts, params)
    finally:
        if args.stats and llm.stats.steps:
            print_stats(llm)
        if args.explain:
            print(explain(llm), file=sys.stderr)


def print_in_order(llm, prompts, params):
    """Each text whole and in order, also what there is of them when Ctrl-C ends it. Refused prompts have none."""
    results, refused = {}, []
    for number, prompt in enumerate(prompts, 1):
        try:
            results[number] = llm.add(prompt, params)
        except ValueError as error:
            refused.append(f"prompt {number}: {error}")
    try:
        while any(result.finish_reason is None for result in results.values()):
            llm.step()
    finally:
        for number, result in results.items():
            write(f"=== {number} ===\n{result.text}\n")
    if refused:
        raise ValueError("; ".join(refused))


def exit_code(program, run, args):
    """Do what a command line asks, `run(args)`: 0 or what it returns; 2, after one line, for what cannot be done."""
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "PASSIVE"
    )  # threads that spin while they wait starve each other on few cores
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch's, where it is not installed
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    try:
        return run(args) or 0
    except BrokenPipeError:  # the reader has gone, as `| head` does; nothing more may be flushed to it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        print(f"{program}: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def main(argv=None):
    return exit_code("python -m nanograph.generate", run, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
