"""`make mutations`: plant small defects, one at a time, and see whether the gate names each.

A seed draws them from all that could be planted in the functions of three areas, before any is
looked at. A run of the gate under coverage says which tests reach each line; a defect is named if
one of those tests fails, or hangs. What no test reaches is not named.

Run it in a clone of its own: it changes files of the product, and puts each back.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import coverage

ROOT = Path(__file__).parents[1]
AREAS = {
    "engine": ("engine",),
    "ledger and services": (
        *("runtime", "scheduler", "trainer", "sampler", "gateway", "environment", "coordinator"),
    ),
    "controller and jobs": ("controller", "jobs"),
}
DATA = ROOT / ".tinsmith" / "mutations"
_FAILED = (1, 2, 124)
"""Codes of a test that fails, of a module that cannot be imported, and of a run that hangs."""
_FIRST_TESTS = 60
_DEADLINE_S = 900.0
_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
}


@dataclass(frozen=True, slots=True)
class Defect:
    """One change of one expression or statement."""

    area: str
    path: str
    line: int
    column: int
    before: str
    after: str


def candidates(area: str, path: Path) -> Iterator[tuple[Defect, ast.AST]]:
    """Yield every defect that can be planted in the functions of a module, with its node."""
    source = path.read_text()
    for function in _functions(ast.parse(source)):
        for node in _body(function):
            for after in _changes(node):
                before = ast.get_source_segment(source, node) or ""
                yield (
                    Defect(
                        area,
                        path.relative_to(ROOT).as_posix(),
                        node.lineno,
                        node.col_offset,
                        before,
                        after,
                    ),
                    node,
                )


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.expr | ast.stmt]:
    """Yield the nodes of a function that say what it does: no texts, no types."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Raise | ast.JoinedStr):
            continue
        if _is_log(node):
            continue
        if isinstance(node, ast.expr | ast.stmt):
            yield node
        skipped = node.annotation if isinstance(node, ast.AnnAssign) else None
        waiting += [child for child in ast.iter_child_nodes(node) if child is not skipped]


def _is_log(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith(("logger.", "'", '"'))


def _changes(node: ast.expr | ast.stmt) -> Iterator[str]:
    match node:
        case ast.Compare(ops=[operator]):
            yield _unparse(ast.Compare(node.left, [_COMPARED[type(operator)]()], node.comparators))
        case ast.BoolOp(op=operator):
            other = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield _unparse(ast.BoolOp(other, node.values))
        case ast.UnaryOp(op=ast.Not()):
            yield _unparse(node.operand)
        case ast.BinOp(op=operator) if type(operator) in _COMPUTED:
            if not isinstance(node.left, ast.Constant | ast.JoinedStr):
                yield _unparse(ast.BinOp(node.left, _COMPUTED[type(operator)](), node.right))
        case ast.Constant(value=bool()):
            yield repr(not node.value)
        case ast.Constant(value=int()):
            yield repr(node.value + 1)
        case ast.IfExp():
            yield _unparse(ast.IfExp(node.test, node.orelse, node.body))
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign():
            yield "pass"
        case ast.Return(value=value) if value is not None and not isinstance(value, ast.Constant):
            yield "return None"
        case _:
            return


def _unparse(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"


def plant(defect: Defect) -> None:
    """Change the file of a defect."""
    path = ROOT / defect.path
    source = path.read_bytes()
    begin = sum(map(len, source.splitlines(keepends=True)[: defect.line - 1])) + defect.column
    before = defect.before.encode()
    assert source[begin : begin + len(before)] == before, "the file is not the one that was read"
    changed = source[:begin] + defect.after.encode() + source[begin + len(before) :]
    compile(changed, defect.path, "exec")
    path.write_bytes(changed)


def draw(seed: int, number: int) -> list[Defect]:
    """Return so many defects of each area, no two of one line."""
    drawn = []
    for area, packages in AREAS.items():
        paths = [
            path
            for package in packages
            for path in sorted((ROOT / "services" / package).rglob("*.py"))
        ]
        defects = [defect for path in paths for defect, _ in candidates(area, path)]
        random.Random(f"{seed} {area}").shuffle(defects)
        lines = {(defect.path, defect.line): defect for defect in reversed(defects)}
        drawn += [d for d in defects if lines[d.path, d.line] is d][:number]
    return drawn


def record_reach(defects: Sequence[Defect], key: str) -> None:
    """Run the gate under coverage; its data says which tests reach the lines of the defects."""
    shutil.rmtree(DATA, ignore_errors=True)
    DATA.mkdir(parents=True)
    settings = DATA / "coveragerc"
    # Of these files alone: a trace of all of services/ takes a multiple of the time.
    files = "".join(sorted({f"\n    {ROOT / defect.path}" for defect in defects}))
    settings.write_text(f"[run]\ninclude ={files}\ndata_file = {DATA}/reach\n")
    options = ["--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
    with (DATA / "gate.log").open("w") as log:
        code = _pytest(["-m", "gate", *options], log_to=log.fileno(), deadline_s=7200.0)
    if code:
        raise SystemExit(f"the gate does not pass without a defect; see {DATA / 'gate.log'}")
    (DATA / "key").write_text(key)


class Reach:
    """Which tests run which lines.

    Args:
        data: Of `coverage`, with the tests as contexts.
    """

    def __init__(self, data: Path) -> None:
        self._data = coverage.CoverageData(str(data))
        self._data.read()

    def tests_of(self, defect: Defect) -> list[str]:
        """Return the node ids of the tests that run the line of a defect, nearest first."""
        by_line = self._data.contexts_by_lineno(str(ROOT / defect.path))
        tests = {context.partition("|")[0] for context in by_line.get(defect.line, ()) if context}
        package = defect.path.split("/")[1]
        near = f"tests/unit/{package}/"
        files: dict[str, int] = {}
        ranked = []
        for test in sorted(tests, key=lambda test: (not test.startswith(near), test)):
            file = test.partition("::")[0]
            files[file] = files.get(file, 0) + 1
            ranked.append((files[file] // 4, not test.startswith(near), test))
        return [test for *_, test in sorted(ranked)]


def judge(defect: Defect, tests: Sequence[str]) -> tuple[str, str]:
    """Plant a defect, run the tests, put the file back; return how it was met and by what."""
    if not tests:
        return "not reached", ""
    content = (ROOT / defect.path).read_bytes()
    plant(defect)
    try:
        for part in (tests[:_FIRST_TESTS], tests[_FIRST_TESTS:]):
            if part:
                (DATA / "tests").write_text("\n".join(part))
                with (DATA / "run.log").open("w") as log:
                    code = _pytest(
                        ["-x", "--timeout=100", "-m", "gate", f"@{DATA / 'tests'}"],
                        log_to=log.fileno(),
                        deadline_s=_DEADLINE_S,
                    )
                if code not in (0, *_FAILED):
                    raise SystemExit(f"pytest ended with {code}; see {DATA / 'run.log'}")
                if code:
                    lines = (DATA / "run.log").read_text(errors="replace").splitlines()
                    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
                    return "named", (failed or [f"exit code {code}"])[0][:200]
        return "not named", f"by {len(tests)} tests"
    finally:
        (ROOT / defect.path).write_bytes(content)


def _commit() -> str:
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _pytest(arguments: Sequence[str], *, log_to: int, deadline_s: float) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-n", str(os.cpu_count() or 1), "--dist", "loadfile", *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=log_to, stderr=log_to, start_new_session=True
    )
    try:
        return process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return 124


def main() -> int:
    """Plant what is drawn; print a line for each and the sum."""
    parser = argparse.ArgumentParser(prog="make mutations", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=20, help="defects of each area")
    arguments = parser.parse_args()
    defects = draw(arguments.seed, arguments.number)
    known = DATA / "key"
    key = f"{_commit()}{arguments.seed} {arguments.number}"
    if not known.exists() or known.read_text() != key:
        record_reach(defects, key)
    reach = Reach(DATA / "reach")
    results = []
    for number, defect in enumerate(defects, 1):
        begin_s = time.monotonic()
        result, by = judge(defect, reach.tests_of(defect))
        results.append({**asdict(defect), "result": result, "by": by})
        place = f"{defect.path}:{defect.line}"
        change = f"{defect.before!r} -> {defect.after!r}"
        seconds = time.monotonic() - begin_s
        sys.stdout.write(f"{number}. {result}: {place}: {change} ({by}; {seconds:.0f} s)\n")
        sys.stdout.flush()
    (DATA / "results.json").write_text(json.dumps(results, indent=1))
    for area in AREAS:
        named = [r for r in results if r["area"] == area and r["result"] == "named"]
        sys.stdout.write(f"{area}: {len(named)} of {arguments.number} named\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
