"""JSON that is wrong on purpose: as text, since much of it is what no JSON library would write."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

_LONG = 10 * 2**20


@dataclass(frozen=True, slots=True)
class Raw:
    """A value as it is to be written."""

    text: str


_HOSTILE = [
    *("null", "true", "false", "0", "1", "-1", "1.5", "-0", "1e400", "-1e400", "1e-400"),
    *("NaN", "Infinity", "-Infinity", "2147483647", "2147483648", "4294967296", "1000000000"),
    *("9223372036854775807", "9223372036854775808", "18446744073709551616"),
    *("[]", "{}", '""', '"x"', "[null]", '[1,"a",{}]', '{"a":{"b":[1]}}', '"0"', '"1e5"'),
    *('"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '"a\\u0000b"', '"\\uffff"', '"\\u202e"'),
    *('"é\U0001f9e8\u0301"', '"../../etc/passwd"', '"a/b"', '"%2f"', '"%00"', '"*"', '"-"', '"."'),
    *('"projects/default"', '"projects/-/trainingRuns/-"', '"tinker://"', '"tinker://a/b/c/d"'),
    *('"tinker://a/weights/b"', '"tinker://-/weights/-"', '"op.x/1/optim_step"', '"op."'),
    *('"sample.x.1"', '"sample.."', '"loss.x.0"', '"a-train-1"', '"a:train:1"', '"a-sample-1"'),
    *('"' + "x" * 300 + '"', '"' + "x" * 70_000 + '"', "[" * 90 + "]" * 90),
    *("[" * 5000 + "]" * 5000, "[" * 100_000, '{"a":' * 150 + "1" + "}" * 150, "1" + "0" * 400),
    *("1" * 5000, "[" + "1," * 5000 + "1]", '["' + '","'.join("abc") + '"]', "tru", "'x'", "\x01"),
]


def hostile_value(chance: random.Random) -> Raw:
    """Return something that is likely not what was asked for."""
    if chance.random() < 0.001:
        return Raw('"' + "y" * _LONG + '"')
    if chance.random() < 0.1:
        return Raw(str(chance.randrange(-(2**70), 2**70)))
    return Raw(chance.choice(_HOSTILE))


def mutate(body: Any, chance: random.Random) -> str:
    """Return the text of a body with one to three of its parts replaced, removed or doubled."""
    for _ in range(chance.randint(1, 3)):
        body = _replaced(body, chance)
    text = write(body, chance)
    return _torn(text, chance) if chance.random() < 0.1 else text


def write(value: Any, chance: random.Random | None = None) -> str:
    """Return the text of a value; with chances, keys are written twice now and then."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict):
        parts = []
        for key, one in value.items():
            part = f"{json.dumps(key)}:{write(one, chance)}"
            parts.append(part)
            if chance is not None and chance.random() < 0.02:
                parts.append(f"{json.dumps(key)}:{hostile_value(chance).text}")
        return "{" + ",".join(parts) + "}"
    if isinstance(value, list):
        return "[" + ",".join(write(one, chance) for one in value) + "]"
    return json.dumps(value)


def _replaced(value: Any, chance: random.Random) -> Any:
    is_leaf = not isinstance(value, dict | list) or not value
    if is_leaf or chance.random() < 0.1:
        return hostile_value(chance)
    if isinstance(value, list):
        copy = list(value)
        index = chance.randrange(len(copy))
        copy[index] = _replaced(copy[index], chance)
        return copy
    fields = dict(value)
    key = chance.choice(list(fields))
    match chance.randrange(6):
        case 0:
            del fields[key]
        case 1:
            fields[chance.choice(["", "type", "\u0000", "__proto__", "x" * 1000])] = hostile_value(
                chance
            )
        case _:
            fields[key] = _replaced(fields[key], chance)
    return fields


def _torn(text: str, chance: random.Random) -> str:
    """Return text with a piece cut out, or with something foreign in it."""
    begin = chance.randrange(len(text) + 1)
    end = min(len(text), begin + chance.randint(0, 20))
    return text[:begin] + chance.choice(["", "\x00", '"', "}", "//", "\\u"]) + text[end:]
