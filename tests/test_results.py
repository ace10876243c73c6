"""README's figures are those of the committed results."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "tutorials" / "results"


def result(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def row(*figures):
    """A pattern for a table row that holds these figures in this order."""
    return re.compile(re.escape(" | ".join(f"{figure:,}" for figure in figures)))


@pytest.mark.parametrize("shape", ["gpt-oss-20b", "gpt-oss-120b", "gpt2"])
def test_times_of_published_shapes(shape):
    measured = result(shape)
    steps, equal = measured["steps, bit-equal"]
    assert steps == equal > 0
    assert row(*measured["decode one request, ms"].values()).search(README)
    assert row(*measured["prefill, ms"]["64"].values()).search(README)


def test_times_of_nano():
    rows = result("nano_decode")["rows"]
    for kernels in ("reference", "triton"):
        figures = [f"{one['milliseconds']}, {one['launches']:,}" for one in rows if one["kernels"] == kernels]
        assert " | ".join(figures) in README


def test_bits_per_byte():
    assert f"{result('train_nano')['held_out_bits_per_byte']:.2f} bits per byte" in README


@pytest.mark.parametrize("path", [*RESULTS.glob("*.json")], ids=lambda path: path.stem)
def test_results_say_where_they_come_from(path):
    assert {"command", "date", "torch", "device", "driver"} <= json.loads(path.read_text(encoding="utf-8")).keys()


def test_links_lead_somewhere():
    for page in (ROOT / "README.md", RESULTS / "README.md"):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), target
