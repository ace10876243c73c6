"""The project stays small enough to be read in a weekend: code lines (no blanks, comments, docstrings) are budgeted.

When a budget binds, drop an option, not an explanation.
"""

import ast
import io
import statistics
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "nanograph"
SILENT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
TOOLS = ("diff.py", "explain.py", "trace.py", "bench.py")


def docstring_lines(tree):
    lines = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            lines |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def code_lines(path):
    source = path.read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for t in tokens if t.type not in SILENT for line in range(t.start[0], t.end[0] + 1)}
    return len(lines - docstring_lines(ast.parse(source)))


def part_of(path):
    if "triton" in path.parts:
        return "triton kernels"
    return "tools" if path.name in TOOLS else "engine"


def test_line_budget(capsys):
    counts = {path: code_lines(path) for path in sorted(PACKAGE.rglob("*.py"))}
    sums = {"engine": 0, "triton kernels": 0, "tools": 0}
    with capsys.disabled():
        print()
        for path, count in counts.items():
            sums[part_of(path.relative_to(PACKAGE))] += count
            print(f"{count:5d}  {path.relative_to(PACKAGE)}")
        print(", ".join(f"{part}: {count}" for part, count in sums.items()))
    assert sums["engine"] <= 2000
    assert sums["triton kernels"] <= 550
    assert sums["tools"] <= 650
    assert max(counts.values()) <= 350


def test_functions_are_short_and_files_say_what_they_are_for():
    lengths = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), f"{path} has no module docstring"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                lengths.append(node.end_lineno - node.lineno + 1)
    assert statistics.median(lengths) <= 10
    assert sum(length > 40 for length in lengths) <= 0.05 * len(lengths), sorted(lengths)[-12:]
