"""The parts of a run have owners: only a class itself assigns to its attributes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tinsmith_trainer

PACKAGE = Path(tinsmith_trainer.__file__).parent
OWNERS = {
    "runs/run.py": "LiveRun",
    "runs/run_queue.py": "RunQueue",
    "runs/resident_state.py": "ResidentState",
    "cycle/sequence_gaps.py": "GapTimer",
    "ownership/run_registry.py": "RunRegistry",
    "residency/manager.py": "Residency",
    "ownership/adoption.py": "RunAdoption",
    "ownership/lease.py": "Lease",
    "cycle/loop.py": "Cycle",
    "pod.py": "TrainerPod",
}
CHANGING = {"add", "append", "clear", "extend", "insert", "pop", "remove", "setdefault", "update"}


def targets_of(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what a statement assigns to or deletes, and what a call changes in place."""
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            stack = list(targets)
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            stack = [target]
        case ast.Call(
            func=ast.Name(id="setattr"), args=[target, ast.Constant(value=str(name)), *_]
        ):
            stack = [ast.Attribute(target, name)]
        case ast.Call(func=ast.Attribute(value=ast.Attribute() as target, attr=name)) if (
            name in CHANGING
        ):
            stack = [target]
        case _:
            stack = []
    while stack:
        target = stack.pop()
        if isinstance(target, ast.Tuple | ast.List):
            stack += target.elts
        elif isinstance(target, ast.Subscript | ast.Starred):
            stack.append(target.value)
        else:
            yield target


def assigned_elsewhere(source: str, attributes: set[str]) -> list[str]:
    """Return the assignments to these attributes of anything but `self`."""
    return [
        ast.unparse(target)
        for node in ast.walk(ast.parse(source))
        for target in targets_of(node)
        if isinstance(target, ast.Attribute)
        and target.attr in attributes
        and not (isinstance(target.value, ast.Name) and target.value.id == "self")
    ]


def attributes_of(path: str, name: str) -> set[str]:
    """Return the attributes that a class gives its instances."""
    [owner] = [
        node
        for node in ast.parse((PACKAGE / path).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return {
        target.attr
        for node in ast.walk(owner)
        for target in targets_of(node)
        if isinstance(target, ast.Attribute)
    }


def test_attributes_of_the_parts_of_a_run_are_assigned_by_their_class_alone() -> None:
    for path, name in OWNERS.items():
        attributes = attributes_of(path, name)
        assert attributes, name
        for module in PACKAGE.rglob("*.py"):
            found = assigned_elsewhere(module.read_text(), attributes)
            assert not found, f"{module.name} changes what {name} owns: {found}"


@pytest.mark.parametrize(
    "statement",
    [
        "run.queue.running = frozenset()",
        "run.state.replay_cost_s += 1.0",
        "run.is_closed: bool = True",
        "run.queue.failures[0] = 1",
        "del run.queue.failures[0]",
        "run.obstacle, run.record = '', record",
        "setattr(run, 'obstacle', '')",
        "run.queue.failures.append(1)",
    ],
)
def test_every_form_of_assignment_is_found(statement: str) -> None:
    attributes = {"running", "replay_cost_s", "is_closed", "failures", "obstacle", "record"}
    assert assigned_elsewhere(statement, attributes)


def test_reads_and_assignments_to_self_are_none() -> None:
    source = "self.failures = run.queue.failures\nfailures = list(run.queue.failures)"
    assert not assigned_elsewhere(source, {"failures"})
