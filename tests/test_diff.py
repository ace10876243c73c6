"""diff finds no difference where there is none, and names the operation where there is one."""

import json
import subprocess
import sys
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from conftest import GPT2, GPU, NANO, make_model

from nanograph import LLM, SamplingParams, diff
from nanograph.diff import Row, compare, join, table, tapped, verdict
from nanograph.options import MODES

PROMPTS = [[1, 2, 3, 4, 5], [6, 7], list(range(30))]


def make_llms(*models, modes=MODES, **options):
    """An LLM for each mode, over one model or one each; padded, so that their logits must be bit-equal."""
    options = {"max_batch_tokens": 24, "max_requests": 3, "pad_to_bucket": True, **options}
    return [LLM(models[index % len(models)], mode, **options) for index, mode in enumerate(modes)]


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.mark.parametrize("config", [NANO, GPT2])
def test_equal_models_are_bit_equal_at_the_bucket(config):
    rows = compare(make_llms(make_model(config), buckets=[3, 24]), PROMPTS, max_new_tokens=4)
    assert {row.kind for row in rows} == {"prefill", "mixed", "decode"}
    assert all(row.max_delta == 0 and row.parted is None and row.agreeing == row.num_requests for row in rows)
    assert {row.num_rows for row in rows[:3]} == {24}
    assert [row.launched for row in rows[:3]] == ["eager", "captured", "captured"]
    assert [row.launched for row in rows[-3:]] == ["eager", "replayed", "replayed"]
    for eager, breakable, full in zip(rows[::3], rows[1::3], rows[2::3]):
        assert eager.calls == eager.kernels > breakable.calls > full.calls == 1
        assert full.kernels > 100
        assert eager.device_ms is None


@pytest.mark.parametrize("mode", ["breakable", "full"])
@pytest.mark.parametrize(
    ("weight", "operation"),
    [
        ("embedding.weight", "embedding"),
        ("blocks.0.attention.sinks", "layer 0 attention "),
        ("blocks.1.qkv.weight", "layer 1 qkv"),
        ("blocks.1.mlp.down", "layer 1 mlp "),
        ("head.weight", "no block"),
    ],
)
def test_one_wrong_weight_in_one_mode_is_found_and_named(model, mode, weight, operation):
    wrong = make_model()
    wrong.get_parameter(weight).mul_(1.5)
    rows = compare(make_llms(model, wrong, modes=("eager", mode)), [[1, 2, 3]], max_new_tokens=1)
    assert rows[1].max_delta > 1e-3
    assert rows[1].parted.startswith(operation)
    assert rows[0].max_delta == 0
    assert rows[0].parted is None


def test_the_first_engine_chooses_the_tokens_of_all(model):
    wrong = make_model(scale=7.0)
    llms = make_llms(model, wrong, modes=("eager", "eager"))
    chosen = []
    for llm in llms:
        update = llm.scheduler.update
        llm.scheduler.update = lambda plan, tokens, update=update: (chosen.append(tokens), update(plan, tokens))
    rows = compare(llms, [[1, 2, 3]], max_new_tokens=6)
    [alone] = LLM(model, "eager").generate([[1, 2, 3]], SamplingParams(temperature=0, max_new_tokens=6))
    assert chosen[::2] == chosen[1::2] == 2 * [[token] for token in alone.token_ids], "once more, with taps"
    assert sum(row.agreeing for row in rows[1::2]) < 6, "the second engine would have chosen otherwise"


def test_a_number_frozen_in_a_graph_is_found_where_replays_part():
    model = make_model()
    right = model.blocks[1].mlp.forward
    model.blocks[1].mlp.forward = lambda x, batch: (
        right(x, batch) * batch.num_tokens
    )  # live in eager, frozen in a graph
    eager, full = [], []
    llms = make_llms(model, modes=("eager", "full"), buckets=[24])
    for row in compare(llms, PROMPTS[:2], max_new_tokens=3):
        (eager if row.engine == "eager" else full).append(row)
    assert [row.num_tokens for row in full] == [7, 2, 2]
    assert full[0].max_delta == 0, "captured with 7 tokens, as the first step has"
    assert all(row.parted.startswith("layer 1 mlp") for row in full[1:])
    assert "2 of 3 steps differ" in verdict(full, "eager")
    assert "first in step 2: layer 1 mlp" in verdict(full, "eager")


def test_the_graphs_of_a_comparison_hold_no_taps(model):
    wrong = make_model()
    wrong.blocks[0].qkv.weight[0, 0] += 1.0
    llms = make_llms(model, wrong, modes=("full", "full"))
    nodes = {}
    for _ in range(2):
        rows = compare(llms, [[1, 2, 3]], max_new_tokens=1)
        assert rows[1].parted.startswith("layer 0 qkv")
        nodes.setdefault(llms[1].executor.graphs[3], rows[1].kernels)
    assert len(nodes) == 1, "the second comparison replays the graph of the first"
    assert not any(module._forward_hooks for module in wrong.modules())


def test_taps_are_captured_and_change_no_logits(model):
    eager, full = make_llms(model, modes=("eager", "full"))
    seen = {}
    for llm in (eager, full):
        plain = LLM(
            model, llm.options.mode, **{k: v for k, v in vars(llm.options).items() if k not in ("model", "mode")}
        )
        for prompt in ([1, 2, 3], [9, 8, 7]):  # the second prompt replays what the first has captured
            llm.add(prompt), plain.add(prompt)
            with tapped(llm, seen.setdefault(llm.options.mode, {})):
                logits = run_step(llm)
            assert torch.equal(logits, run_step(plain))
    assert full.stats.replays == 1
    assert list(seen["full"]) == list(seen["eager"])
    assert len(seen["full"]) == 1 + 7 * NANO.num_layers
    for name, buffer in seen["full"].items():
        assert torch.equal(buffer[:3], seen["eager"][name][:3]), name
        assert buffer[:3].any(), name


@torch.no_grad()
def run_step(llm):
    plan = llm.scheduler.schedule()
    llm.batch.fill(plan, llm.executor.bucket_for(sum(count for _, count in plan)))
    logits = llm.executor.run().clone()
    llm.scheduler.update(plan, logits.argmax(-1).tolist())
    llm.scheduler.cancel(plan[0][0].request_id)
    return logits


def test_what_is_no_number_differs(model):
    wrong = make_model()
    wrong.blocks[1].attention_output.bias[0] = torch.nan
    rows = compare(make_llms(model, wrong, modes=("eager", "full")), [[1, 2]], max_new_tokens=1)
    assert rows[1].max_delta == float("inf")
    assert rows[1].parted.startswith("layer 1 attention_output (max |Δ| inf")


def test_different_schedules_and_bad_prompts_are_refused_and_leave_nothing_behind(model):
    llms = [LLM(model, "eager", max_batch_tokens=size, max_requests=3) for size in (24, 16)]
    with pytest.raises(ValueError, match="schedules differ"):
        compare(llms, PROMPTS)
    with pytest.raises(ValueError, match="prompt is empty"):
        compare(llms, [[1], []])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        compare(llms, [[64]])
    assert not any(llm.scheduler.requests for llm in llms)


def make_row(steps="1", engine="eager", kind="decode", max_delta=0.0, host_ms=1.0, launched="eager", device_ms=None):
    sizes = {"agreeing": 1, "num_requests": 1, "num_tokens": 1, "num_rows": 2, "kernels": 1234, "calls": 7}
    return Row(
        steps, kind, engine, max_delta, parted=None, launched=launched, host_ms=host_ms, device_ms=device_ms, **sizes
    )


def test_steps_that_look_alike_are_joined():
    rows = [make_row("1", kind="prefill"), make_row("1", "full", "prefill", launched="captured")]
    for step, (delta, ms) in enumerate([(0.5, 1.0), (2.0, 9.0), (1.0, 2.0)], 2):
        rows += [make_row(f"{step}", host_ms=ms), make_row(f"{step}", "full", max_delta=delta, device_ms=ms)]
    rows += [make_row("5"), make_row("5", "full")]
    joined = list(join(rows, 2))
    assert [row.steps for row in joined] == ["1", "1", "2-4", "2-4", "5", "5"]
    eager, full = joined[2:4]
    assert (eager.host_ms, full.device_ms, full.max_delta, full.agreeing, full.num_requests) == (2.0, 2.0, 2.0, 3, 3)
    lines = table(joined, 2).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert " ".join(lines[0].split()) == (
        "step kind tokens engine rows padded launched max|Δ| top-1 kernels calls host ms GPU ms"
    )
    assert " ".join(lines[4].split()) == "full 2 1 eager 2 3/3 1234 7 1.00 2.00"


@pytest.fixture
def command_line(monkeypatch, model, capsys):
    """Run diff's command line over small models: the last engine's may be a wrong one."""

    def run(*arguments, wrong=None):
        def open_llms(args, **changes):
            llms = make_llms(model, model, wrong or model, max_batch_tokens=args.max_batch_tokens, **changes)
            llms[0].tokenizer = SimpleNamespace(encode=lambda text: [ord(character) % 64 for character in text])
            return llms

        monkeypatch.setattr(diff, "open_llms", open_llms)
        code = diff.main(["--max-new-tokens", "3", *arguments])
        return code, capsys.readouterr()

    return run


def test_the_command_line_tables_and_judges(command_line, tmp_path):
    code, said = command_line("--at-bucket", "--prompt", "to be", "--prompt", "or", "--json", str(tmp_path / "rows"))
    assert (code, said.err) == (0, "")
    assert "full: bit-equal to eager in all 3 steps" in said.out
    assert len(said.out.splitlines()) == 1 + 3 * 3 + 2
    rows = json.loads((tmp_path / "rows").read_text())
    assert len(rows) == 3 * 3
    last = rows[-1]
    assert list(last) == [field.name for field in fields(Row)]
    assert (last["steps"], last["kind"], last["engine"], last["launched"]) == ("3", "decode", "full", "replayed")
    assert (last["num_tokens"], last["num_rows"], last["num_requests"], last["agreeing"]) == (2, 2, 2, 2)
    assert (last["max_delta"], last["parted"], last["calls"], last["device_ms"]) == (0.0, None, 1, None)
    _, said = command_line("--all", "--explain")
    assert len(said.out.split("\neager: ")[0].splitlines()) == 1 + 3 * 3 + 2
    assert "full: captured graphs: 2, in" in said.out


def test_a_difference_is_an_error_only_at_the_bucket(command_line, tmp_path):
    wrong = make_model()
    wrong.blocks[0].qkv.bias[0] = torch.nan
    once = ("--max-new-tokens", "1")
    code, said = command_line(*once, "--json", str(tmp_path / "rows"), wrong=wrong)
    assert code == 0
    assert "full: 1 of 1 steps differ, by up to inf; first in step 1: layer 0 qkv" in said.out
    assert json.loads((tmp_path / "rows").read_text())[2]["max_delta"] is None, "JSON has no infinity"
    assert command_line(*once, "--at-bucket", wrong=wrong)[0] == 1


def test_other_kernels_round_differently_and_are_not_judged(command_line, monkeypatch):
    wrong = make_model()
    wrong.blocks[0].qkv.weight[0, 0] += 1.0
    make = make_llms

    def with_kernels(*models, **options):
        llms = make(*models, **options)
        for llm, kernels in zip(llms, ("reference", "reference", "triton")):
            object.__setattr__(llm.options, "kernels", kernels)
        return llms

    monkeypatch.setitem(globals(), "make_llms", with_kernels)
    code, said = command_line("--at-bucket", "--max-new-tokens", "1", wrong=wrong)
    assert code == 0
    assert "full triton: 1 of 1 steps differ" in said.out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--modes", "eager,fall"], "unknown mode 'fall': choose from eager, breakable, full"),
        (["--kernels", "cuda"], "unknown kernels 'cuda': choose from reference, triton"),
        (["--breaks", "atention"], "unknown break 'atention'"),
        (["--json", "/nowhere/rows.json"], "/nowhere"),
    ],
)
def test_bad_arguments_are_one_line(capsys, arguments, complaint):
    assert diff.main(["--max-new-tokens", "1", "--max-batch-tokens", "8", *arguments]) == 2
    said = capsys.readouterr()
    assert complaint in said.err
    assert len(said.err.splitlines()) == 1


def test_arguments_are_checked_before_torch_is_loaded():
    check = "import sys, nanograph.diff, nanograph.trace; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


@pytest.mark.gpu
@pytest.mark.parametrize("config", [NANO, GPT2])
def test_modes_are_bit_equal_at_the_bucket_on_a_gpu(config):
    rows = compare(make_llms(make_model(config, GPU)), PROMPTS, max_new_tokens=4)
    assert all(row.max_delta == 0 for row in rows)
    for eager, breakable, full in zip(rows[::3], rows[1::3], rows[2::3]):
        assert full.calls == 1
        assert eager.calls > breakable.calls > 1
        assert min(eager.kernels, breakable.kernels, full.kernels) > 50
        assert min(row.device_ms for row in (eager, breakable, full)) > 0
    wrong = make_model(config, GPU)
    wrong.blocks[1].qkv.weight[3, 4] += 5.0
    rows = compare(make_llms(make_model(config, GPU), wrong, modes=("eager", "full")), PROMPTS, max_new_tokens=2)
    assert all(row.parted.startswith("layer 1 qkv") for row in rows[1::2])
