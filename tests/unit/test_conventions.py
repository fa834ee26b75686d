"""Tests use what is public, and their files are short enough to be read whole.

A private member that a test reads ties the test to an implementation: the next change of it breaks
the test without breaking a promise. The two tables are what is left of older tests: a number may
only be lowered, and an entry goes with the last use.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = 500
# Named tuples have public methods with a leading underscore.
_PUBLIC = {"_replace", "_fields", "_asdict", "_make"}
_PATCHING = {"setattr", "delattr", "getattr", "hasattr"}

# Private members that the tests of a file still use.
PRIVATE = {
    "tests/contract/coordinator/test_episode_bounds.py": 1,
    "tests/contract/coordinator/test_episode_groups.py": 1,
    "tests/contract/coordinator/test_episodes.py": 2,
    "tests/contract/coordinator/test_episodes_sdk.py": 2,
    "tests/contract/gateway/test_gateway_front.py": 1,
    "tests/contract/gateway/openai/test_openai_calls.py": 2,
    "tests/contract/sampler/test_sampler_in_flight.py": 3,
    "tests/contract/sampler/test_sampler_streaming.py": 3,
    "tests/contract/gateway/test_tinker_wire.py": 6,
    "tests/contract/trainer/test_trainer_checkpoint_life.py": 3,
    "tests/contract/trainer/test_trainer_cycle.py": 16,
    "tests/contract/trainer/test_trainer_given_up_calls.py": 3,
    "tests/contract/trainer/test_trainer_object_store.py": 3,
    "tests/contract/trainer/test_trainer_shared_ledger.py": 24,
    "tests/e2e/release.py": 4,
    "tests/fakes/openai_harness.py": 2,
    "tests/fakes/trainer_harness.py": 3,
    "tests/integration/servers.py": 3,
    "tests/real/test_real_shapes.py": 1,
    "tests/unit/engine/distributed/scenarios.py": 6,
    "tests/unit/engine/distributed/test_full_runs.py": 1,
    "tests/unit/engine/test_reading_weights.py": 1,
    "tests/unit/engine/test_sampling_extras.py": 3,
    "tests/unit/engine/test_small_products.py": 1,
    "tests/unit/environment/test_environment_workers.py": 3,
    "tests/unit/environment/unruly_environments.py": 1,
    "tests/unit/recipes/test_run_log.py": 1,
    "tests/unit/runtime/test_runtime_auth.py": 1,
    "tests/unit/runtime/test_runtime_leases.py": 3,
    "tests/unit/sdk/test_cli_mistakes.py": 3,
    "tests/unit/sdk/test_client.py": 1,
    "tests/unit/sdk/test_job_readiness.py": 1,
    "tests/unit/test_embedded_settings.py": 9,
}

# Lines of files that are still longer than the limit, rounded up to the next ten.
LONG = {
    "tests/contract/gateway/test_tinker_wire.py": 780,
    "tests/fakes/sdk_fake_server.py": 710,
    "tests/unit/engine/test_exactness.py": 560,
    "tests/unit/runtime/ledger_suite.py": 740,
}


_LIKELY = re.compile(
    r"(?m)(?<!\bself)(?<!\bcls)\._[a-zA-Z]|[\"'][\w.]*\b_[a-zA-Z]|import.*\b_|^\s+_\w+( as \w+)?,?$"
)


def _files() -> Iterator[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "tests/*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = (ROOT / line for line in sorted(set(listed.stdout.splitlines())))
    return (path for path in paths if path.is_file())


def _is_private(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last.startswith("_") and not last.startswith("__") and last not in _PUBLIC


def private_uses(source: str) -> list[tuple[int, str]]:
    """Return line and name of each private member that is read, imported or patched by its name."""
    found: list[tuple[int, str]] = []
    # Few files have what looks like one, and a walk through all of them takes seconds.
    for node in ast.walk(ast.parse(source)) if _LIKELY.search(source) else ():
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}):
                found.append((node.lineno, node.attr))
        elif isinstance(node, ast.ImportFrom):
            found += [(node.lineno, each.name) for each in node.names if _is_private(each.name)]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            named = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
            if called in _PATCHING:
                found += [
                    (node.lineno, each)
                    for each in named
                    if isinstance(each, str) and _is_private(each)
                ]
    return sorted(found)


def test_tests_use_no_private_members() -> None:
    used = {str(path.relative_to(ROOT)): private_uses(path.read_text()) for path in _files()}
    wrong = {name: uses for name, uses in used.items() if len(uses) > PRIVATE.get(name, 0)}
    assert not wrong, wrong


def test_files_are_short() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in _files()}
    wrong = {name: count for name, count in lines.items() if count > LONG.get(name, MAX_LINES)}
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("a._b", ["_b"]),
        ("a._b._c", ["_b", "_c"]),
        ("from a import _b, c", ["_b"]),
        ("from a import (\n    _b as b,\n    c,\n)", ["_b"]),
        ("def f():\n    from a import (\n        _b,\n    )", ["_b"]),
        ("patch.setattr(a, '_b', 1)", ["_b"]),
        ("patch.setattr('a._b', 1)", ["a._b"]),
        ("self._a; cls._b; a.__dict__; a._replace(b=1); a.b", []),
    ],
)
def test_private_uses_are_found(source: str, names: list[str]) -> None:
    assert [name for _, name in private_uses(source)] == names
