"""The controller's role has each verb that the controller's code asks the API server for.

A cluster would refuse the call at the moment when it is needed; here the code itself is read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.fakes.chart_harness import COMPONENT, VALUE_SETS, load_values, merge, of_kind, render

import tinsmith_controller
from tinsmith_controller.kube import api_client
from tinsmith_controller.kube.api_client import Resource

CODE = Path(tinsmith_controller.__file__).parent
VERBS = {
    "get": "get",
    "list": "list",
    "watch": "watch",
    "create": "create",
    "replace": "update",
    "patch": "patch",
    "delete": "delete",
}
WATCHED = [
    *("JOBS", "POOLS", "PODS", "NODES", "PRIORITY_CLASSES"),
    *("WORKLOADS", "RESOURCE_FLAVORS", "WORKLOAD_PRIORITY_CLASSES"),
]
KUEUE = "kueue.x-k8s.io"
# Calls whose resource is a variable: what it may be, by file and method.
VARIABLE = {
    ("kube/informer.py", "list"): WATCHED,
    ("kube/informer.py", "watch"): WATCHED,
    ("owned_objects.py", "create"): ["SECRETS", "SERVICES"],
    ("owned_objects.py", "get"): ["SECRETS", "SERVICES"],
    # A service has no data that could differ.
    ("owned_objects.py", "replace"): ["SECRETS"],
    ("status_writer.py", "get"): ["JOBS", "POOLS"],
    ("status_writer.py", "replace"): ["JOBS", "POOLS"],
    # Only jobs outlive their time.
    ("reconciler.py", "delete"): ["JOBS"],
}

Right = tuple[str, str, str]
"""API group, resource with its subresource, verb."""


def calls_of(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            receiver = ast.unparse(node.func.value)
            if receiver.endswith("cluster") and node.func.attr in VERBS:
                yield node


def rights_asked_for() -> set[Right]:
    found = set()
    for path in CODE.rglob("*.py"):
        for call in calls_of(path):
            assert isinstance(call.func, ast.Attribute)
            method, [named, *_] = call.func.attr, call.args
            assert isinstance(named, ast.Name | ast.Attribute), ast.unparse(call)
            place = (path.relative_to(CODE).as_posix(), method)
            name = ast.unparse(named)
            subresources = [
                f"/{keyword.value.value}"
                for keyword in call.keywords
                if keyword.arg == "subresource" and isinstance(keyword.value, ast.Constant)
            ]
            for one in [name] if name.isupper() else VARIABLE[place]:
                resource: Resource = getattr(api_client, one)
                # The status of a workload is all that is replaced of it.
                is_ours = one in ("JOBS", "POOLS")
                is_right = bool(subresources) == (is_ours and method == "replace")
                # Of Kueue's Workloads both are replaced.
                if is_right or one == "WORKLOADS":
                    plural = resource.plural + "".join(subresources)
                    found.add((resource.group, plural, VERBS[method]))
    return found


def rights_of(values: str, *, has_kueue: bool) -> set[Right]:
    changes = {"controller": {"settings": {"kueue": has_kueue}}}
    manifests = render(merge(load_values(values), changes))
    return {
        (group, resource, verb)
        for role in of_kind(manifests, "Role", "ClusterRole")
        if role["metadata"]["labels"][COMPONENT] == "controller"
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_the_calls_are_found() -> None:
    """What a reader of the code would name first; an empty set would need no right."""
    assert {
        ("tinsmith.dev", "trainingjobs/status", "update"),
        ("tinsmith.dev", "trainingjobs", "watch"),
        ("", "pods", "create"),
        ("", "nodes", "list"),
        ("", "secrets", "update"),
        ("coordination.k8s.io", "leases", "update"),
    } <= rights_asked_for()


def test_the_controller_may_do_what_its_code_asks_for() -> None:
    for values in VALUE_SETS:
        assert rights_asked_for() - rights_of(values, has_kueue=True) == set(), values


def test_it_has_rights_on_kueue_only_where_kueue_is_used_and_no_more_than_it_asks_for() -> None:
    for values in VALUE_SETS:
        assert KUEUE not in {group for group, _, _ in rights_of(values, has_kueue=False)}
        asked = {right for right in rights_asked_for() if right[0] == KUEUE}
        given = {right for right in rights_of(values, has_kueue=True) if right[0] == KUEUE}
        # A class or flavor is listed and watched; `get` is what people check rights with.
        assert {right for right in given - asked if right[2] != "get"} == set()
