"""The generate command at its edges, beside test_cli.py: strange files and prompts, signals, pipes, exit codes.

Most run `main` in this process with a small random model over bytes; the last run the real command.
"""

import dataclasses
import io
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import tiktoken
from conftest import NANO, make_model

from nanograph import engine, generate
from nanograph.tokenizer import Tokenizer

RUN = ["--max-new-tokens", "6", "--temperature", "0"]
PRINTABLE = bytes(range(32, 127))


@pytest.fixture(scope="module")
def model():
    return make_model(dataclasses.replace(NANO, vocab_size=256))


@pytest.fixture
def run(model, monkeypatch, capsys):
    """run(*arguments): (exit code, standard output, standard error) of the command with a small model over bytes."""

    class Small(engine.LLM):
        def __init__(self, **options):
            super().__init__(**{**options, "model": model})
            ranks = {bytes([byte]): byte for byte in range(256)}
            encoding = tiktoken.Encoding("bytes", pat_str=r"(?s).", mergeable_ranks=ranks, special_tokens={})
            self.tokenizer = Tokenizer(encoding)

    monkeypatch.setattr(engine, "LLM", Small)

    def run(*arguments):
        try:
            code = generate.main([*RUN, *arguments])
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return run


def refused(outcome):
    """The one line of a refusal, without the name of the command."""
    code, out, err = outcome
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("python -m nanograph.generate: ")
    return err.removeprefix("python -m nanograph.generate: ").rstrip("\n")


# Prompts


def test_strange_prompts_are_text_or_one_line(run):
    """TOK-7."""
    began = time.perf_counter()
    assert refused(run("--prompt", "a" * 1_000_000)).startswith("prompt 1: prompt has 1000000 tokens, limit 255")
    assert time.perf_counter() - began < 10
    assert refused(run("--prompt", "a\udc80")) == "prompt 1: prompt is not valid Unicode: lone surrogate at character 1"
    for prompt in ("\n\n\n", " ", "\t", "\u00e9\U0001f600\u4e2d", "<|endoftext|>", "a\0b"):
        code, out, err = run("--prompt", prompt)
        assert (code, err) == (0, "")
        assert out.endswith("\n")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "prompt is empty: give at least one character"),
        (b"ROMEO \xff", "the prompt file {} is not UTF-8 (byte 6)"),
        ("ROMEO".encode("utf-16"), "the prompt file {} is not UTF-8 (byte 0)"),
        (b"x" * 256, "prompt 1: prompt has 256 tokens, limit 255: the context holds 256, one of which is left for a "),
    ],
)
def test_prompt_files_that_are_none(run, tmp_path, data, message):
    path = tmp_path / "prompt"
    path.write_bytes(data)
    assert refused(run("--prompt-file", str(path))).startswith(message.format(path))


def test_prompt_files_that_cannot_be_read(run, tmp_path):
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file"), ("", "Is a directory")):
        assert refused(run("--prompt-file", str(path))).startswith(f"cannot read the prompt file {path}: {reason}")
    two_lines = refused(run("--prompt-file", str(tmp_path / "a\nb")))
    assert two_lines == f"cannot read the prompt file {tmp_path}/a b: No such file or directory"


def test_a_file_and_standard_input_are_prompts_as_they_are(run, tmp_path, monkeypatch):
    text = "\u00e9 two\nlines\n"
    (tmp_path / "prompt").write_text(text, encoding="utf-8")
    expected = run("--prompt", text)
    assert run("--prompt-file", str(tmp_path / "prompt")) == expected
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
    assert run("--prompt-file", "-") == expected
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"")))
    assert refused(run("--prompt-file", "-")) == "prompt is empty: give at least one character"


def test_messages_are_one_line_whatever_they_quote(run):
    for option in ("--mode", "--breaks", "--buckets", "--seed", "--kernels", "--dtype", "--unknown"):
        assert "b" in refused(run(option, "a\nb"))


# Numbers


def test_numbers_beyond_all_bounds(run):
    for option, value, message in (
        ("--max-batch-tokens", "100000000000000", "no memory for the buffers: lower max_batch_tokens"),
        ("--max-batch-tokens", "-1", "max_batch_tokens must be 1 or more, not -1"),
        ("--max-context", "1000", "max_context 1000 exceeds the model's 256 positions"),
        ("--max-context", "0", "max_context must be 1 or more, not 0"),
        ("--temperature", "inf", "temperature must be a finite number, 0 or more, not inf"),
        ("--temperature", "1e400", "temperature must be a finite number, 0 or more, not inf"),
        ("--top-p", "nan", "top_p must be in (0, 1], not nan"),
        ("--top-k", "1.5", "argument --top-k: invalid int value: '1.5'"),
    ):
        assert refused(run(f"{option}={value}")).startswith(message)


def test_numbers_at_their_edges(run):
    expected = run("--top-p", "1")
    for arguments in (["--top-k", str(10**20)], ["--temperature", "1e-300"], ["--seed", str(-(10**20))]):
        assert run(*arguments) == expected
    code, out, _ = run("--max-new-tokens", str(10**20), "--ignore-eos")
    assert code == 0
    assert len(out) > 100  # up to the context's end: 250 bytes, of which some are characters together


def test_a_prompt_beyond_the_largest_bucket_runs(run):
    """DIS-3."""
    expected = run("--prompt", "x" * 50, "--mode", "eager")
    for mode in ("breakable", "full"):
        assert run("--prompt", "x" * 50, "--mode", mode, "--buckets", "16", "--max-batch-tokens", "64") == expected


# What goes where


def test_several_prompts_are_framed_and_one_is_not(run):
    code, alone, err = run("--prompt", "one")
    assert (code, err) == (0, "")
    assert "===" not in alone
    code, out, err = run("--prompt", "one", "--prompt", "two", "--prompt", "one")
    assert (code, err) == (0, "")
    first, second, third = out.split("=== ")[1:]
    assert first == f"1 ===\n{alone}"
    assert second.startswith("2 ===\n")
    assert third == f"3 ===\n{alone}"


def test_bad_prompts_among_good_ones(run):
    """SCH-3: the others are printed, under their own numbers; exit code 2 says that some are missing."""
    code, out, err = run("--prompt", "", "--prompt", "one", "--prompt", "x" * 300, "--prompt", "a\udc80")
    assert code == 2
    assert out == f"=== 2 ===\n{run('--prompt', 'one')[1]}"
    assert err.count("\n") == 1
    for part in (
        "prompt 1: prompt is empty",
        "prompt 3: prompt has 300 tokens",
        "prompt 4: prompt is not valid Unicode",
    ):
        assert part in err
    assert refused(run("--prompt", "", "--prompt", "")) == "prompt is empty: give at least one character"


def test_reports_go_to_standard_error(run):
    _, plain, _ = run()
    code, out, err = run("--stats", "--explain", "--mode", "full")
    assert (code, out) == (0, plain)
    assert "6 steps: " in err
    assert "graph" in err


@pytest.mark.parametrize("prompts", [["one"], ["one", "two"]])
@pytest.mark.parametrize("after", [0, 3])
def test_ctrl_c_prints_what_there_is(run, prompts, after, monkeypatch):
    arguments = [word for prompt in prompts for word in ("--prompt", prompt)]
    whole = run(*arguments)[1]
    step, steps = engine.LLM.step, []

    def interrupted(llm):
        steps.append(1)
        if len(steps) > after:
            raise KeyboardInterrupt
        return step(llm)

    monkeypatch.setattr(engine.LLM, "step", interrupted)
    code, out, err = run(*arguments)
    assert (code, err) == (130, "")
    if len(prompts) == 1:
        assert whole.startswith(out)
        assert bool(out) == bool(after)
    else:
        texts = [part.split(" ===\n")[1].removesuffix("\n") for part in out.split("=== ")[1:]]
        wholes = [part.split(" ===\n")[1].removesuffix("\n") for part in whole.split("=== ")[1:]]
        assert len(texts) == 2
        assert all(one.startswith(text.rstrip("\ufffd")) for one, text in zip(wholes, texts))


# The command itself

COMMAND = [sys.executable, "-m", "nanograph.generate", "--device", "cpu", "--temperature", "0"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def test_a_reader_that_goes_away_from_several_texts():
    words = " ".join([*COMMAND, "--max-new-tokens", "5", "--prompt", "ROMEO:", "--prompt", "JULIET:"])
    result = subprocess.run(
        ["bash", "-c", f"{words} | head -n 1; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=120,
    )
    assert result.stdout == "=== 1 ===\n"
    assert result.stderr == ""
    assert result.returncode in (0, 141)  # all was written before the reader went, or not


def test_a_true_ctrl_c():
    """SIGINT to a run that would go on for long: what was generated stays, nothing else is said."""
    command = [*COMMAND, "--max-new-tokens", "1000", "--ignore-eos"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT) as process:
        first = process.stdout.read(20)  # it is generating
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(first + rest) >= 20
    assert err == b""


def test_output_is_utf8_whatever_the_locale():
    code = "from nanograph.generate import exit_code, write; exit_code('x', lambda _: write('\\xe9\\u4e2d'), None)"
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, timeout=60)
    assert (result.returncode, result.stdout.decode(), result.stderr) == (0, "\u00e9\u4e2d", b"")
