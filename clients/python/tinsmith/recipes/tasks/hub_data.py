"""Data sets of the hub, by their address: which part, which columns, which revision.

    hf://NAME[:CONFIG][?KEY=VALUE&KEY=VALUE...]

`NAME` is a data set of the hub, or a folder with the same files, which begins with `/` or `.`. The
keys are `split` (what is trained on), `validation` (what is held out), `revision`, and names of
columns: `answer=solution` reads the column `solution` as `answer`. Splits may be slices, as
`datasets` writes them: `train[:90%]`. Values may be percent-encoded.

Hugging Face's `datasets` loads them, if it is installed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from tinsmith.errors import ConfigurationError, UnavailableError

HUB = "hf://"
COLUMNS = (
    "question",
    "answer",
    "prompt",
    "completion",
    "messages",
    "chosen",
    "rejected",
    "images",
)
"""Columns that recipes read and that an address may name."""
HELD_OUT_PARTS = ("validation", "test")
"""Parts that are held out, unless an address names another; the first that is there."""

_TRAIN = "train"
_AWAY = ("ConnectionError", "TimeoutError", "TransportError", "LocalEntryNotFoundError")
"""What the library, and the clients below it, raise where no answer came and there is no copy."""
_OFFLINE = "OfflineModeIsEnabled"
_TOO_MANY, _SERVER_ERRORS = 429, 500
"""Statuses of HTTP behind which the same request may succeed."""
_ALL = "all"
"""All parts, as `datasets` calls them."""
_KEYS = ("split", "validation", "revision")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?|[./].*")

Rows = Mapping[str, Sequence[Mapping[str, Any]]]
_Stretch = tuple[str, int, int]
"""A part, the first of its rows that are taken, and where they end."""


@dataclass(frozen=True, slots=True)
class HubAddress:
    """What an address says.

    Attributes:
        name: Of the data set; a path, if it begins with `/` or `.`.
        config: Of its configurations; empty for the only one.
        split: What is trained on; empty for the part `train`.
        validation: What is held out; empty for the part `validation` or `test`.
        revision: A branch, a tag or a commit; empty for the newest.
        columns: The set's name of each column that is read under another one.
    """

    name: str
    config: str
    split: str
    validation: str
    revision: str
    columns: Mapping[str, str]

    @property
    def is_folder(self) -> bool:
        """Whether it names a folder of this machine."""
        return self.name.startswith(("/", "."))


def parse_address(data: str) -> HubAddress:
    """Return what an address says.

    Raises:
        ConfigurationError: If it is none, or has a part that is unknown, empty or there twice.
    """
    place, _, query = data.removeprefix(HUB).partition("?")
    name, _, config = place.partition(":")
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{data} names no data set", remedy="write hf://OWNER/NAME, or hf:///FOLDER"
        )
    found: dict[str, str] = {}
    for part in query.split("&") if query else ():
        key, _, value = part.partition("=")
        if key not in (*_KEYS, *COLUMNS):
            raise ConfigurationError(
                f"{data}: {key!r} is no key of an address",
                remedy=f"the keys are {', '.join(_KEYS)}, and columns: {', '.join(COLUMNS)}",
            )
        if not value or key in found:
            problem = "is there twice" if key in found else "has no value"
            raise ConfigurationError(f"{data}: {key} {problem}", remedy=f"write {key}=VALUE once")
        found[key] = unquote(value)
    split, validation, revision = (found.pop(key, "") for key in _KEYS)
    if len(set(found.values())) < len(found):
        raise ConfigurationError(
            f"{data} reads a column under two names", remedy="name each column once"
        )
    address = HubAddress(name, config, split, validation, revision, found)
    if address.is_folder and revision:
        raise ConfigurationError(f"{data}: a folder has no revisions", remedy="leave revision out")
    return address


def is_of_hub(data: str) -> bool:
    """Return whether data is a good address of a set of the hub, and of no folder."""
    if not data.startswith(HUB):
        return False
    try:
        return not parse_address(data).is_folder
    except ConfigurationError:
        return False


def data_name(data: str) -> str:
    """Return what data is called in titles and names of folders."""
    return Path(data.partition("?")[0] if data.startswith(HUB) else data).name


def load_hub(data: str) -> Rows:
    """Return the part to train on, `train`, and what is held out, if there is such a part.

    Raises:
        ConfigurationError: If the address is wrong, or the data set cannot be loaded or lacks
            what the address names.
        UnavailableError: If the hub cannot be reached, or does not answer as it should.
    """
    address = parse_address(data)
    if address.is_folder and not Path(address.name).is_dir():
        raise ConfigurationError(f"{data}: there is no folder {address.name}", remedy="check it")
    if not address.is_folder and Path(address.name).exists():
        # The library would take the folder, whatever revision the address names.
        raise ConfigurationError(
            f"{data} is a folder here too", remedy=f"write {HUB}./{address.name} for the folder"
        )
    found = dict(_load(data, address))
    if not address.split and _TRAIN not in found:
        raise ConfigurationError(
            f"{data} has no part train; it has {', '.join(found)}",
            remedy="name the part to train on: ?split=NAME",
        )
    lengths = {part: len(rows) for part, rows in found.items()}
    trained = _stretches(data, address.split or _TRAIN, lengths)
    if not address.validation:
        # What is trained on is not held out, also where the set calls it `test`.
        taken = {part for part, _, _ in trained}
        free = [part for part in HELD_OUT_PARTS if found.get(part) and part not in taken]
        held_out = [(part, 0, lengths[part]) for part in free[:1]]
    else:
        held_out = _stretches(data, address.validation, lengths)
        if _meet(trained, held_out):
            raise ConfigurationError(
                f"{data} trains on what it holds out",
                remedy="name stretches that do not meet: ?split=train[20%:]&validation=train[:20%]",
            )
    parts = {_TRAIN: _take(data, found, trained)}
    if held_out:
        parts[HELD_OUT_PARTS[0]] = _take(data, found, held_out)
    return {part: _name_columns(data, address, part, rows) for part, rows in parts.items()}


def load_saved(folder: Path) -> Rows:
    """Return what `save_to_disk` of `datasets` wrote.

    Raises:
        ConfigurationError: If `datasets` is not installed.
    """
    return _import_datasets().load_from_disk(str(folder))  # type: ignore[no-any-return]


def _load(data: str, address: HubAddress) -> Any:
    """Return all parts."""
    datasets = _import_datasets()
    try:
        return datasets.load_dataset(
            address.name,
            address.config or None,
            revision=address.revision or None,
        )
    except Exception as error:
        # The library raises whatever its transports raise.
        problem = f"{data} cannot be loaded: {type(error).__name__}: {error}"
        if _may_pass(error):
            raise UnavailableError(
                problem, remedy="check the network, or give a folder of JSONL files"
            ) from error
        raise ConfigurationError(
            problem, remedy="check the address, or give a folder of JSONL files"
        ) from error


def _may_pass(error: Exception) -> bool:
    """Whether the hub was away, rather than that it has no such data set.

    The library hides why: behind a hub that does not answer it looks for a copy, and says that
    there is none.
    """
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in seen:
        seen.append(link)
        link = link.__cause__ or link.__context__
    if any(type(one).__name__ == _OFFLINE for one in seen):
        return False  # By a setting of this process.
    return any(map(_was_away, seen))


def _was_away(error: BaseException) -> bool:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return bool(status >= _SERVER_ERRORS or status == _TOO_MANY)
    return any(kind.__name__ in _AWAY for kind in type(error).__mro__)


def _stretches(data: str, split: str, lengths: Mapping[str, int]) -> list[_Stretch]:
    """Return the rows that a split takes, in its order."""
    parts = {name.partition("[")[0].strip() for name in split.split("+")}
    if unknown := parts - {*lengths, _ALL}:
        raise ConfigurationError(
            f"{data} has no part {', '.join(sorted(unknown))}",
            remedy=f"its parts are {', '.join(lengths)}",
        )
    if _ALL in parts:
        return [(part, 0, length) for part, length in lengths.items()]
    try:
        taken = _import_datasets().ReadInstruction.from_spec(split).to_absolute(lengths)
    except (ValueError, AssertionError) as error:
        raise ConfigurationError(
            f"{data}: {split} is no split: {error}", remedy="write a part, or PART[FROM:TO]"
        ) from error
    return [(one.splitname, one.from_, one.to) for one in taken]


def _meet(left: Sequence[_Stretch], right: Sequence[_Stretch]) -> bool:
    """Whether two splits have a row in common."""
    return any(
        part == other_part and max(first, other_first) < min(end, other_end)
        for part, first, end in left
        for other_part, other_first, other_end in right
    )


def _take(data: str, found: Mapping[str, Any], stretches: Sequence[_Stretch]) -> Any:
    """Return the rows of stretches, one after the other."""
    rows = [found[part].select(range(first, end)) for part, first, end in stretches]
    try:
        return _import_datasets().concatenate_datasets(rows)
    except ValueError as error:
        raise ConfigurationError(
            f"{data} takes parts that differ: {error}", remedy="name parts with the same columns"
        ) from error


def _name_columns(data: str, address: HubAddress, part: str, rows: Any) -> Any:
    """Return rows whose columns have the names that recipes read."""
    there = list(rows.column_names)
    missing = [source for source in address.columns.values() if source not in there]
    if missing:
        raise ConfigurationError(
            f"{data}: the part {part} has no column {', '.join(missing)}",
            remedy=f"its columns are {', '.join(there)}",
        )
    renamed = {source: name for name, source in address.columns.items() if source != name}
    # A column of the set that has a name which is given to another one gives way.
    hidden = [name for name in renamed.values() if name in there and name not in renamed]
    return rows.remove_columns(hidden).rename_columns(renamed)


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigurationError(
            "data of this form needs Hugging Face's datasets, which is not installed",
            remedy="pip install 'tinsmith[data]'",
        ) from error
    return datasets
