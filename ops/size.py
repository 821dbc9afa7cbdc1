"""Lines per folder, the longest files and the longest functions; fails over the limits below.

`python ops/size.py` needs the standard library only. A function's lines are those of its body: its
signature and its docstring explain, and do not count.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("broker", "engine", "kernels", "clients/python/tokenbus", "ops")
MAX_FILE_LINES = 300
MAX_TEST_FILE_LINES = 700
MAX_FUNCTION_LINES = 40
MAX_TEST_LINES = 60
MAX_KERNEL_LINES = 120
"""A kernel is a function that triton.jit compiles or that launches one."""

COUNTED_SUFFIXES = (".py", ".lua", ".c", ".h", ".hpp", ".cpp", ".ts", ".mjs", ".sh", ".md")
NUM_LONGEST = 8


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """A file or a function, by its length."""

    lines: int
    limit: int
    name: str

    def __str__(self) -> str:
        mark = f"  over its limit of {self.limit}" if self.is_over else ""
        return f"{self.lines:6} {self.name}{mark}"

    @property
    def is_over(self) -> bool:
        """Too long."""
        return self.lines > self.limit


def tracked_files() -> list[Path]:
    """The files that git knows, or every file where there is no git; relative to the root."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        paths = [path.relative_to(ROOT) for path in ROOT.rglob("*")]
        hidden = (".", "node_modules", "build", "dist")
        return [p for p in paths if not any(part.startswith(hidden) for part in p.parts)]
    return [Path(name) for name in listed.stdout.split("\0") if name]


def functions(path: Path, tree: ast.Module) -> Iterator[Piece]:
    """Every function of a file with the lines of its body."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[ast.get_docstring(node) is not None :]
            lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            yield Piece(lines, function_limit(path, node), f"{path}:{node.lineno} {node.name}")


def function_limit(path: Path, node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How long this function may be."""
    if is_kernel(node):
        return MAX_KERNEL_LINES
    return MAX_TEST_LINES if path.parts[0] == "tests" else MAX_FUNCTION_LINES


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Compiled by Triton, or a launcher: `kernel[grid](...)`, whose lines are its arguments."""
    if any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list):
        return True
    return any(
        isinstance(part, ast.Call)
        and isinstance(part.func, ast.Subscript)
        and ast.unparse(part.func.value).endswith("_kernel")
        for part in ast.walk(node)
    )


def top_folder(path: Path) -> str:
    """The folder that a file is counted in."""
    depth = 2 if path.parts[0] in ("clients", "tests") else 1
    return "/".join(path.parts[:-1][:depth]) or "."


def main() -> int:
    """Print the tables. Returns 1 when a file or a function is over its limit."""
    lines: Counter[str] = Counter()
    count: Counter[str] = Counter()
    files: list[Piece] = []
    bodies: list[Piece] = []
    for path in tracked_files():
        if path.suffix not in COUNTED_SUFFIXES or not (ROOT / path).is_file():
            continue
        text = (ROOT / path).read_text(encoding="utf-8")
        num_lines = text.count("\n")
        lines[top_folder(path)] += num_lines
        count[top_folder(path)] += 1
        if path.suffix == ".py":
            is_product = str(path).startswith(PRODUCT)
            limit = MAX_FILE_LINES if is_product else MAX_TEST_FILE_LINES
            files.append(Piece(num_lines, limit, str(path)))
            bodies.extend(functions(path, ast.parse(text)))
    for folder in sorted(lines):
        print(f"{lines[folder]:6} {folder}  ({count[folder]} files)")
    print(f"{lines.total():6} in all")
    for title, pieces in (("longest files", files), ("longest functions", bodies)):
        pieces.sort(reverse=True)
        print(title)
        shown = [piece for i, piece in enumerate(pieces) if i < NUM_LONGEST or piece.is_over]
        print("\n".join(map(str, shown)))
    return int(any(piece.is_over for piece in (*files, *bodies)))


if __name__ == "__main__":
    sys.exit(main())
