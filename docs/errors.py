"""Writes errors.md: each reason of an error with cause, remedy and the test that raises it.

Cause and remedy are the comment of the reason in errors.proto, and what the SDK says. The test is
in errors.toml. A reason without a test is refused, and so is a test that is not there.
"""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from docs.descriptors import ENUM_VALUE, FILE_ENUM, ROOT, files

import tinsmith
from tinsmith.error_hints import REMEDIES
from tinsmith_runtime import errors

PAGE = ROOT / "docs/errors.md"
TESTS = ROOT / "docs/errors.toml"
_PREFIX = "ERROR_REASON_"
_HEAD = """# Errors

Generated from the code by `make docs`. Every error of the service has a status code and a reason.
The reason is `ErrorInfo.reason` on the wire, `error.reason` in Python, and what the command line
prints in parentheses:

```text
run run-1 does not exist (RUN_NOT_FOUND); check the name with Client.runs.list()
```

`error.metadata` has the values that the message quotes, and `error.retry_after_s` is set where the
same request may succeed later. The client itself sends a call again after `UNAVAILABLE`, and after
other codes if the server says when; what reaches a program has outlasted that. Limits and their
variables are on [a page of their own](limits.md).

| reason | code | cause |
| --- | --- | --- |
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One reason of the page.

    Attributes:
        reason: Its name without the prefix of the enum.
        classes: The errors of pods that have it, the first of which names the code.
        cause: The first sentence of its comment.
        remedy: The rest of its comment.
        test: `file::function` of a test that raises it.
    """

    reason: str
    classes: tuple[type[errors.TinsmithError], ...]
    cause: str
    remedy: str
    test: str

    @property
    def code(self) -> str:
        """The status code of the reason."""
        return self.classes[0].code.value if self.classes else "any"

    @property
    def caught_as(self) -> str:
        """The class of the SDK that a program catches."""
        names = (base.__name__ for base in self.classes[0].__mro__) if self.classes else ()
        return next((name for name in names if hasattr(tinsmith, name)), "TinsmithError")

    def text(self) -> str:
        """Return the section of the page."""
        hint = REMEDIES.get(self.reason, "")
        remedy = " ".join(filter(None, [self.remedy, f"From Python: {hint}." if hint else ""]))
        return (
            f"## {self.reason}\n\n"
            f"`{self.code}`, raised in Python as `tinsmith.{self.caught_as}`.\n\n"
            f"- **Cause.** {self.cause}\n- **Remedy.** {remedy}\n- **Raised by** `{self.test}`.\n"
        )


def entries() -> Iterator[Entry]:
    """Yield the reasons in the order of their names.

    Raises:
        ValueError: If a reason has no test, or a test that does not raise it.
    """
    tests = tomllib.loads(TESTS.read_text(encoding="utf-8"))
    comments = dict(sorted(_reasons()))
    if unknown := sorted(tests.keys() - comments.keys()):
        raise ValueError(f"errors.toml names what is no reason: {', '.join(unknown)}")
    for reason, comment in comments.items():
        if reason not in tests:
            raise ValueError(f"{reason} has no test: name one that raises it in docs/errors.toml")
        cause, _, remedy = comment.partition(". ")
        entry = Entry(
            reason, tuple(_classes(reason)), f"{cause.rstrip('.')}.", remedy, tests[reason]
        )
        _check_test(entry)
        yield entry


def _reasons() -> Iterator[tuple[str, str]]:
    for file, comments in files():
        for index, enum in enumerate(file.enum_type):
            if enum.name == "ErrorReason":
                for place, value in enumerate(enum.value):
                    comment = comments[(FILE_ENUM, index, ENUM_VALUE, place)]
                    if value.number:
                        yield value.name.removeprefix(_PREFIX), " ".join(comment.split())


def _classes(reason: str) -> Iterator[type[errors.TinsmithError]]:
    """Yield the classes of a reason; one that states it comes before those that inherit it."""
    found: Mapping[str, object] = vars(errors)
    for value in found.values():
        if not inspect.isclass(value) or not issubclass(value, errors.TinsmithError):
            continue
        if vars(value).get("reason") == reason:
            yield value


def _check_test(entry: Entry) -> None:
    name, _, function = entry.test.partition("::")
    source = (ROOT / name).read_text(encoding="utf-8") if (ROOT / name).is_file() else ""
    tree = ast.walk(ast.parse(source))
    if function not in {getattr(node, "name", "") for node in tree}:
        raise ValueError(f"{entry.reason}: there is no test {entry.test}; see docs/errors.toml")
    words = [entry.reason, *(each.__name__ for each in entry.classes)]
    if not re.search(rf"\b({'|'.join(words)})\b", source):
        raise ValueError(f"{entry.reason}: {name} does not name it; see docs/errors.toml")


def page() -> str:
    """Return the text of the page."""
    found = list(entries())
    rows = [
        f"| [{each.reason}](#{each.reason.lower()}) | `{each.code}` | {each.cause} |\n"
        for each in found
    ]
    return _HEAD + "".join(rows) + "\n" + "\n".join(each.text() for each in found)
