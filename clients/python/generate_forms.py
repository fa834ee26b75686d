"""Writes the public forms of the SDK's calls: `python clients/python/generate_forms.py [--check]`.

A call is written once, as a coroutine that runs in the client's background loop, in a module
`*_calls.py`. A decorator of `tinsmith.rpc.forms` says which forms users get:

* `@call` on `async def _x`: `x()` blocks and returns the result; `x_async()` awaits it.
* `@future("what {name}")` on `async def _x`: `x()` returns a `ResultFuture`; `x_async()` awaits it.
* `@submits` on `def x`, which returns a future at once: `x_async()` does the same in asyncio code.
* `@awaited` on `def x`, which returns a future at once: `x_async()` awaits it.

The generated class derives from the written one. It is committed, as stubs are, so that editors and
type checkers see true signatures of both forms.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent / "tinsmith"


@dataclass(frozen=True, slots=True)
class Target:
    """One generated module.

    Attributes:
        source: The module with the calls, below `tinsmith`.
        written: Its class.
        module: The generated module, below `tinsmith`.
        generated: Its class.
        summary: First line of the module and of the class.
    """

    source: str
    written: str
    module: str
    generated: str
    summary: str


TARGETS = (
    Target(
        "checkpoints/checkpoint_calls.py",
        "CheckpointCalls",
        "checkpoints/client.py",
        "CheckpointClient",
        "Checkpoints of the project: `Client.checkpoints`.",
    ),
    Target(
        "keys/key_calls.py", "KeyCalls", "keys/client.py", "KeyClient", "API keys: `Client.keys`."
    ),
    Target(
        "training/list_calls.py",
        "TrainingRunListCalls",
        "training/client.py",
        "TrainingRunListClient",
        "Training runs of the project: `Client.runs`.",
    ),
    Target(
        "environments/environment_calls.py",
        "EnvironmentCalls",
        "environments/client.py",
        "EnvironmentClient",
        "Environments of the server: `Client.environments`.",
    ),
    Target(
        "episodes/episode_calls.py",
        "EpisodeCalls",
        "episodes/client.py",
        "EpisodeClient",
        "Episodes of the project: `Client.episodes`.",
    ),
    Target(
        "matches/match_calls.py",
        "MatchCalls",
        "matches/client.py",
        "MatchClient",
        "Matches of the project: `Client.matches`.",
    ),
    Target(
        "rollouts/rollout_calls.py",
        "RolloutCalls",
        "rollouts/client.py",
        "RolloutClient",
        "Rollouts that the server plays: `Client.rollouts`.",
    ),
    Target(
        "rollouts/play_calls.py",
        "PlayCalls",
        "rollouts/environments.py",
        "PlayableEnvironments",
        "Environments of the server, and playing them: `Client.environments`.",
    ),
    Target(
        "account/session_calls.py",
        "SessionCalls",
        "account/sessions.py",
        "SessionClient",
        "Sessions of the project: `Client.sessions`.",
    ),
    Target(
        "account/audit_calls.py",
        "AuditCalls",
        "account/audit.py",
        "AuditClient",
        "What was done in the project: `Client.audit`.",
    ),
    Target(
        "account/usage_calls.py",
        "UsageCalls",
        "account/usage.py",
        "UsageClient",
        "What was used, and budgets: `Client.usage`.",
    ),
    Target("jobs/job_calls.py", "JobCalls", "jobs/client.py", "JobClient", "Jobs: `Client.jobs`."),
    Target(
        "sampling/sampler_calls.py",
        "SamplerCalls",
        "sampling/sampler.py",
        "Sampler",
        "A handle to sample with; lives as long as its client.",
    ),
    Target(
        "training/run_calls.py",
        "TrainingRunCalls",
        "training/training_run.py",
        "TrainingRun",
        "One trainable model on the server: the handle that a training loop works with.",
    ),
    Target(
        "client_calls.py",
        "ClientCalls",
        "client_forms.py",
        "ClientForms",
        "The calls of `Client` that create runs and samplers.",
    ),
)


def render(target: Target) -> str:
    """Return the text of a generated module, before formatting."""
    source = (ROOT / target.source).read_text()
    tree = ast.parse(source)
    written = next(
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == target.written
    )
    imports = [
        ast.unparse(node)
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        and getattr(node, "module", "") != "__future__"
    ]
    # Types that only annotations need are imported at run time here: the module is above them all.
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            imports += [ast.unparse(each) for each in node.body]
    local = [name for node in tree.body for name in _public_names(node)]
    module = "tinsmith." + target.source.removesuffix(".py").replace("/", ".")
    lines = [
        f'"""{target.summary}',
        "",
        f"Generated by `make sdk` from `{Path(target.source).name}`: edit that.",
        '"""',
        "from __future__ import annotations",
        "import builtins",
        "from tinsmith.rpc.futures import ResultFuture",
        *imports,
        f"from {module} import {', '.join(local)}",
        "",
        f"class {target.generated}({target.written}):",
        *(_indented(_class_docstring(target, written))),
    ]
    methods = [
        text
        for node in written.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for text in forms(node)
    ]
    if any(re.match(r"def list\(", method) for method in methods):
        methods = [re.sub(r"(?<![\w.])list\[", "builtins.list[", method) for method in methods]
    lines += [line for method in methods for line in ["", *_indented(method)]]
    return "\n".join(lines) + "\n"


def forms(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Yield the forms of one method; none if it is not a call."""
    for decorator in node.decorator_list:
        kind = decorator.func if isinstance(decorator, ast.Call) else decorator
        if not isinstance(kind, ast.Name) or kind.id not in (
            "call",
            "future",
            "submits",
            "awaited",
        ):
            continue
        name = node.name.removeprefix("_")
        parameters, arguments = ast.unparse(node.args), _arguments(node.args)
        returned = ast.unparse(node.returns) if node.returns else "None"
        document = _docstring(node)
        if kind.id == "submits":
            yield (
                f"async def {name}_async({parameters}) -> {returned}:\n"
                f'    """Submit as `{name}` does; await the future for the result."""\n'
                f"    return self.{name}({arguments})"
            )
            return
        if kind.id == "awaited":
            result = re.sub(r"^ResultFuture\[(.*)\]$", r"\1", returned)
            yield (
                f"async def {name}_async({parameters}) -> {result}:\n"
                f'    """Do as `{name}`, and await the result."""\n'
                f"    return await self.{name}({arguments})"
            )
            return
        done = f"self._{name}({arguments})"
        answer = "" if returned == "None" else "return "
        if kind.id == "future":
            assert isinstance(decorator, ast.Call)
            what = ast.unparse(ast.JoinedStr(_template(decorator.args[0])))
            yield (
                f"def {name}({parameters}) -> ResultFuture[{returned}]:\n{document}\n"
                f"    return self._core.future({done}, what={what})"
            )
            body = f"return await self.{name}({arguments})"
        else:
            yield (
                f"def {name}({parameters}) -> {returned}:\n{document}\n"
                f"    {answer}self._core.background.call({done})"
            )
            body = f"{answer}await self._core.background.acall({done})"
        yield (
            f"async def {name}_async({parameters}) -> {returned}:\n"
            f'    """Do as `{name}`, without blocking."""\n'
            f"    {body}"
        )


def _template(node: ast.expr) -> list[ast.expr]:
    """Return the parts of an f-string whose text is the constant of a decorator."""
    assert isinstance(node, ast.Constant)
    parsed = ast.parse(f"f{node.value!r}", mode="eval").body
    return parsed.values if isinstance(parsed, ast.JoinedStr) else [node]


def _arguments(arguments: ast.arguments) -> str:
    """Return how a method passes its own parameters on."""
    passed = [each.arg for each in arguments.args if each.arg != "self"]
    passed += [f"{each.arg}={each.arg}" for each in arguments.kwonlyargs]
    return ", ".join(passed)


def _docstring(node: ast.AST) -> str:
    """Return the docstring of a method as source, one level in."""
    text = ast.get_docstring(node, clean=True) or ""  # type: ignore[arg-type]
    lines = text.splitlines()
    if len(lines) == 1:
        return f'    """{text}"""'
    body = "\n".join(f"    {line}" if line else "" for line in lines[1:])
    return f'    """{lines[0]}\n{body}\n    """'


def _class_docstring(target: Target, written: ast.ClassDef) -> str:
    document = _docstring(written)
    return re.sub(r"(?m)^    ", "", document) or f'"""{target.summary}"""'


def _indented(text: str) -> list[str]:
    return [f"    {line}" if line else "" for line in text.splitlines()]


def _public_names(node: ast.stmt) -> Iterator[str]:
    """Yield what a module defines and signatures may use: classes, types, constants."""
    if isinstance(node, ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        name = ast.unparse(node.targets[0])
        if name.isidentifier() and not name.startswith("_"):
            yield name


def formatted(text: str, path: Path) -> str:
    """Return a module without unused imports, sorted and formatted as the repository is."""
    options = ["--stdin-filename", str(path), "-"]
    for command in (
        ["ruff", "check", "-q", "--fix-only", "--select", "F401,I", *options],
        ["ruff", "format", "-q", *options],
    ):
        text = subprocess.run(
            [str(Path(sys.executable).parent / command[0]), *command[1:]],
            input=text,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    return text


def main() -> None:
    """Write the modules, or check that the committed ones are those of the sources."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if a module is stale")
    options = parser.parse_args()
    stale = []
    for target in TARGETS:
        path = ROOT / target.module
        text = formatted(render(target), path)
        if options.check:
            if not path.exists() or path.read_text() != text:
                stale.append(str(path))
        else:
            path.write_text(text)
    if stale:
        sys.exit(f"stale: {', '.join(stale)}; run make sdk")


if __name__ == "__main__":
    main()
