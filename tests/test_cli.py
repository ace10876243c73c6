"""The generate command: what it prints where, and one clear line for everything that cannot be done."""

import json
import shutil
import subprocess
import sys

import pytest

from nanograph import generate
from nanograph.checkpoint import ASSETS

RUN = ["--device", "cpu", "--max-new-tokens", "6", "--temperature", "0"]


def run(capsys, *arguments):
    """(exit code, standard output, standard error) of the command."""
    try:
        code = generate.main([*RUN, *arguments])
    except SystemExit as exit:
        code = exit.code
    out, err = capsys.readouterr()
    return code, out, err


def folder(tmp_path, **changes):
    """A copy of nano's checkpoint with changes to its config."""
    copy = tmp_path / "checkpoint"
    shutil.copytree(ASSETS, copy)
    config = json.loads((copy / "config.json").read_text()) | changes
    (copy / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return copy


BAD = {
    "mode": (["--mode", "fast"], "invalid choice: 'fast'"),
    "model": (["--model", "nanno"], "unknown model 'nanno'"),
    "device": (["--device", "gpu"], "unknown device 'gpu'"),
    "kernels": (["--kernels", "triton"], "kernels triton need a CUDA GPU: use kernels reference"),
    "break": (["--breaks", "attention,router"], "unknown break 'router': choose from norm, qkv"),
    "no breaks": (["--breaks", ""], "unknown break ''"),
    "empty prompt": (["--prompt", ""], "prompt is empty"),
    "long prompt": (["--prompt", "to be " * 600], "limit 1023"),
    "no context": (["--max-context", "1", "--prompt", "a"], "prompt has"),
    "too much context": (["--max-context", "2000"], "max_context 2000 exceeds the model's 1024 positions"),
    "no tokens": (["--max-new-tokens", "0"], "max_new_tokens must be 1 or more, not 0"),
    "not a number": (["--max-new-tokens", "1.5"], "invalid int value"),
    "negative temperature": (["--temperature", "-1"], "temperature must be a finite number, 0 or more, not -1.0"),
    "nan": (["--temperature", "nan"], "temperature must be"),
    "top-p 0": (["--top-p", "0"], "top_p must be in (0, 1], not 0.0"),
    "top-p 2": (["--top-p", "2"], "top_p must be in (0, 1]"),
    "top-k": (["--top-k", "-1"], "top_k must be 0 or more"),
    "empty stop": (["--stop", ""], "stop must be non-empty strings"),
    "bucket 0": (["--buckets", "0"], "each bucket must be 1 or more, not 0"),
    "bucket -4": (["--buckets=-4"], "each bucket must be 1 or more"),
    "bucket abc": (["--buckets", "abc"], "buckets must be integers separated by commas, not 'abc'"),
    "equal buckets": (["--buckets", "8,8"], "buckets must be positive and ascending"),
    "unsorted buckets": (["--buckets", "16,8"], "ascending"),
    "large bucket": (["--buckets", "64", "--max-batch-tokens", "32"], "bucket 64 exceeds max_batch_tokens=32"),
    "no batch": (["--max-batch-tokens", "0"], "max_batch_tokens must be 1 or more"),
    "missing file": (["--prompt-file", "/no/such/file"], "cannot read the prompt file /no/such/file"),
    "directory": (["--prompt-file", "/"], "cannot read the prompt file /"),
    "two prompts": (["--prompt-file", "x", "--prompt", "y"], "not allowed with"),
    "surrogate": (["--prompt", "a\udc80b"], "lone surrogate at character 1"),
    "unknown option": (["--promt", "x"], "unrecognized arguments: --promt"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(case, capsys):
    arguments, expected = BAD[case]
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert expected in err
    assert err.count("\n") == 1


@pytest.mark.skipif("__import__('torch').cuda.is_available()")
def test_cuda_where_there_is_none(capsys):
    code, _, err = run(capsys, "--device", "cuda")
    assert code == 2
    assert "torch sees 0 CUDA GPUs" in err


def test_a_prompt_file_that_is_not_utf8(capsys, tmp_path):
    (tmp_path / "prompt").write_bytes(b"ROMEO \xff")
    code, _, err = run(capsys, "--prompt-file", str(tmp_path / "prompt"))
    assert code == 2
    assert "is not UTF-8 (byte 6)" in err


CHECKPOINTS = {
    "no config": (lambda path: (path / "config.json").unlink(), "config.json"),
    "config is no JSON": (
        lambda path: (path / "config.json").write_text("{"),
        "config.json, which a checkpoint needs, cannot be read",
    ),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "safetensors"),
    "truncated": (lambda path: truncate(path / "model.safetensors"), "model.safetensors"),
}


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_broken_checkpoints_are_named(case, capsys, tmp_path):
    damage, expected = CHECKPOINTS[case]
    path = folder(tmp_path)
    damage(path)
    code, _, err = run(capsys, "--model", str(path))
    assert code == 2
    assert expected in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "llama"}, "llama"),
        ({"num_hidden_layers": 7}, "model.layers.6"),
        ({"intermediate_size": 64}, "shape"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_checkpoints_that_do_not_match_their_config_are_refused_by_name(changes, expected, capsys, tmp_path):
    if "num_hidden_layers" in changes:
        changes = changes | {"layer_types": ["full_attention"] * 7}
    code, _, err = run(capsys, "--model", str(folder(tmp_path, **changes)))
    assert code == 2
    assert expected in err
    assert err.count("\n") == 1


def test_the_completion_alone_is_on_standard_output(capsys):
    code, out, err = run(capsys, "--stats")
    assert code == 0
    assert out.endswith("\n")
    assert "ROMEO" not in out
    assert "steps:" in err
    assert "launches to compute the last step" in err


@pytest.mark.parametrize("mode", ["eager", "breakable", "full"])
def test_modes_print_the_same_text(mode, capsys):
    arguments = ["--prompt", "JULIET:", "--seed", "3", "--temperature", "1", "--mode"]
    assert run(capsys, *arguments, mode)[1] == run(capsys, *arguments, "eager")[1]


def test_several_prompts_in_order_and_a_bad_one_among_them(capsys):
    code, out, err = run(capsys, "--prompt", "ROMEO:", "--prompt", "", "--prompt", "JULIET:")
    alone = [run(capsys, "--prompt", prompt)[1] for prompt in ("ROMEO:", "JULIET:")]
    assert code == 2
    assert out == f"=== 1 ===\n{alone[0]}=== 3 ===\n{alone[1]}"
    assert "prompt 2: prompt is empty" in err


def test_standard_input_is_a_prompt(capsys, monkeypatch):
    import io
    from types import SimpleNamespace

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"ROMEO:")))
    assert run(capsys, "--prompt-file", "-")[1] == run(capsys, "--prompt", "ROMEO:")[1]


def test_a_stop_string_ends_the_text_before_it(capsys):
    whole = run(capsys, "--max-new-tokens", "30")[1]
    word = whole.split()[3]
    stopped = run(capsys, "--max-new-tokens", "30", "--stop", word)[1]
    assert stopped == whole[: whole.index(word)] + "\n"


@pytest.mark.parametrize("prompts", [["ROMEO:"], ["ROMEO:", "JULIET:"]])
def test_ctrl_c_ends_quietly_with_what_there_is(prompts, capsys, monkeypatch):
    from nanograph import LLM

    steps, step = [], LLM.step

    def interrupted(self):
        steps.append(1)
        if len(steps) == 5:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(LLM, "step", interrupted)
    code, out, err = run(
        capsys, "--max-new-tokens", "50", *(word for prompt in prompts for word in ("--prompt", prompt))
    )
    assert code == 130
    assert len(out.strip()) > 5
    assert err == ""


def python(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, **options)


def test_arguments_are_checked_before_torch_is_loaded():
    code = (
        "import sys; from nanograph import generate, scheduler, options\n"
        "for bad in (['--breaks', 'x'], ['--buckets', '0'], ['--temperature', '-1'], ['--mode', 'x']):\n"
        "    try: assert generate.main(bad) == 2\n"
        "    except SystemExit as exit: assert exit.code == 2\n"
        "assert 'torch' not in sys.modules"
    )
    result = python("-c", code)
    assert result.returncode == 0, result.stderr


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m nanograph.generate --device cpu --max-new-tokens 40 | head -c 5"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert len(result.stdout) == 5
    assert result.stderr == ""
