"""The script that trains nano: it trains the model that is served, counts its loss right, and writes what loads.

One small run of the whole script, over a few plays of made-up words, and its parts one by one.
"""

import json
import math
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from nanograph import LLM, SamplingParams
from nanograph.checkpoint import gpt_oss_config, random_model
from nanograph.kernels import reference
from nanograph.model import Attention
from nanograph.tokenizer import load_tokenizer

sys.path.append(str(Path(__file__).parents[1] / "tutorials"))
import train_nano

CPU = torch.device("cpu")


def make_plays(count=4, words=1500):
    """Plays of random words: enough different ones for a whole vocabulary."""
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return [
        f"Play {number}\n\nACT I\n\nROMEO:\n"
        + "\n".join("".join(rng.choices(letters, k=9)) + f" the king, {rng.choice(letters)}." for _ in range(words))
        + "\n"
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def model():
    """nano's true shape with random weights, sinks that matter, and gradients."""
    model = random_model(gpt_oss_config(train_nano.CONFIG), reference, train_nano.CONTEXT, CPU, torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(std=2.0, generator=torch.Generator().manual_seed(1))
            elif not name.endswith("norm.weight"):
                parameter.mul_(4.0)
    return model.requires_grad_(True)


def trainable(model):
    """A copy of the model, without a cache."""
    other = random_model(model.config, reference, train_nano.CONTEXT, CPU, torch.float32).requires_grad_(True)
    other.load_state_dict(model.state_dict())
    return train_nano.without_cache(other)


def logits_of_engine(model, token_ids):
    """Logits after the last of `token_ids`, through the paged cache, in chunks of 64."""
    llm, logits = LLM(model, mode="eager", max_batch_tokens=64), []
    run = llm.executor.run
    llm.executor.run = lambda: logits.append(run().clone()) or logits[-1]
    llm.generate([token_ids], SamplingParams(temperature=0, max_new_tokens=1))
    return logits[-1][0]


def test_training_and_serving_compute_the_same(model):
    """200 tokens: past the sliding window of 128, and several rows at once do not see each other."""
    ids = torch.randint(train_nano.VOCABULARY, (2, 200), generator=torch.Generator().manual_seed(0))
    served = torch.stack([logits_of_engine(model, row.tolist()) for row in ids])
    with torch.no_grad():
        trained = train_nano.forward(trainable(model), ids)[:, -1]
    assert (trained - served).abs().max() < 1e-4 * served.abs().max()


def test_training_leaves_other_models_alone(model):
    before = Attention.forward
    trainable(model)
    assert Attention.forward is before
    assert logits_of_engine(model, [1, 2, 3]).isfinite().all()


def test_every_parameter_learns(model):
    """A detached sink or bias would train silently to nothing."""
    other = trainable(model)
    ids = torch.randint(train_nano.VOCABULARY, (4, 64), generator=torch.Generator().manual_seed(0))
    train_nano.forward(other, ids).square().mean().backward()
    still = [name for name, p in other.named_parameters() if p.grad is None or not p.grad.any()]
    assert still == []


def test_held_out_loss_counts_each_token_once(model):
    """A model that knows nothing spends ln V nats on each token but the first, in overlapping windows."""
    other = trainable(model)
    with torch.no_grad():
        other.head.weight.zero_()
    for length in (2, 513, 1100):
        nats = train_nano.held_out_nats(other, torch.arange(length, dtype=torch.int32))
        assert nats == pytest.approx((length - 1) * math.log(train_nano.VOCABULARY), rel=1e-5)


def test_the_best_weights_are_kept_not_the_last(model, monkeypatch):
    """The held-out loss is rigged to be lowest at the second of four evaluations."""
    other, losses, seen = trainable(model), [3.0, 1.0, 2.0, 4.0], []
    args = SimpleNamespace(steps=4, evaluate_every=1, batch=1, length=8, lr=1e-2, dropout=0.0, weight_decay=0.0)

    def rigged(model, held_out):
        seen.append([parameter.detach().clone() for parameter in model.parameters()])
        return losses[len(seen) - 1]

    monkeypatch.setattr(train_nano, "held_out_nats", rigged)
    log = train_nano.train(other, torch.arange(40, dtype=torch.int32), torch.arange(2), args)
    assert [row["held_out_loss"] for row in log] == losses
    same = [all(map(torch.equal, weights, other.parameters())) for weights in seen]
    assert same == [False, True, False, False]


def test_balance_loss():
    """1 for even use; with all tokens on 2 of 8 experts, 4."""
    even = torch.eye(8).roll(1, 1) * 1e-3 + torch.eye(8) * 1e-3
    assert train_nano.balance_loss(even).item() == pytest.approx(1.0, abs=1e-3)
    crowded = torch.tensor([20.0, 20.0, 0, 0, 0, 0, 0, 0]).repeat(5, 1)
    assert train_nano.balance_loss(crowded).item() == pytest.approx(4.0, abs=1e-3)


def test_learning_rate_rises_then_falls():
    args = SimpleNamespace(lr=1.0, steps=100)
    rates = [train_nano.learning_rate(step, args) for step in range(1, 101)]
    peak = rates.index(max(rates))
    assert peak < 10
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == pytest.approx(0, abs=1e-9)


def test_plays_are_split_and_none_is_lost():
    plays = make_plays(40, words=20)
    text = "\n\n\n".join(plays)
    train, held_out = train_nano.split_plays(text)
    assert sorted(train + held_out) == sorted(plays)
    assert 0.03 < sum(map(len, held_out)) / len(text) < 0.08
    assert train_nano.split_plays(text) == (train, held_out)


def test_vocabulary_repeats_byte_for_byte_and_reads_back(tmp_path):
    plays = make_plays()
    files = [tmp_path / "vocab.tiktoken", tmp_path / "again"]
    for path in files:
        train_nano.train_vocabulary(plays, path)
    assert files[0].read_bytes() == files[1].read_bytes()
    tokenizer = load_tokenizer(tmp_path, train_nano.VOCABULARY)
    assert [tokenizer.decode([token]) for token in tokenizer.encode("\n\nROMEO:\n the king,")] == [
        *("\n\n", "ROMEO", ":", "\n", " the", " king", ",")
    ]
    assert tokenizer.decode(tokenizer.encode(plays[0])) == plays[0]


def run_script(folder, text, *options):
    (folder / "text").write_text(text, encoding="utf-8")
    paths = ["--text", str(folder / "text"), "--out", str(folder / "out"), "--log", str(folder / "log.json")]
    small = ["--device", "cpu", "--steps", "3", "--batch", "2", "--length", "32", "--evaluate-every", "2"]
    return train_nano.main([*paths, *small, *options])


def test_the_whole_script(tmp_path, capsys):
    """Three steps on the CPU: a checkpoint that the engine serves, within its size, and a log of what was done."""
    assert run_script(tmp_path, "\n\n\n".join(make_plays(20, words=100))) == 0
    assert "ROMEO:\n" in capsys.readouterr().out
    out, log = tmp_path / "out", json.loads((tmp_path / "log.json").read_text())
    assert (out / "model.safetensors").stat().st_size <= 16_000_000
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    assert [row["step"] for row in log["log"]] == [2, 3]
    assert log["held_out_loss"] == min(row["held_out_loss"] for row in log["log"])
    assert log["held_out_loss"] < math.log(train_nano.VOCABULARY) + 0.1
    assert "--steps 3 " in log["command"]
    assert str(tmp_path) not in json.dumps(log)
    [result] = LLM(out, device="cpu").generate(["ROMEO:"], SamplingParams(max_new_tokens=5, seed=0))
    assert len(result.token_ids) == 5


@pytest.mark.parametrize(
    ("text", "reason"),
    [("one play, alone", "at least two plays"), ("tiny\n\n\ntext", "too small"), ("", "at least two plays")],
)
def test_texts_that_cannot_be_used(text, reason, tmp_path, capsys):
    assert run_script(tmp_path, text) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1


def test_a_text_that_is_not_there(tmp_path, capsys):
    assert train_nano.main(["--text", str(tmp_path / "none"), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
