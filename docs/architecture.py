"""Draws architecture.svg from the code.

Boxes are packages. A box lists its folders and modules in the order of its import contract: each
imports only those below it. Grey arrows are imports between packages, read from the import graph.
Blue arrows are gRPC calls: the caller builds the stub of a service that the pod implements. Nothing
is placed or named by hand, and `make lint` checks that the picture is as new as the code.
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/architecture.svg"
# Pixels.
_LINE, _HEAD, _WIDTH, _GAP, _ROW_GAP, _MARGIN = 15, 38, 166, 24, 90, 30
# A box with a row of its own lists its parts in columns of this many lines.
_COLUMN = 5
_STUB = re.compile(r"\b\w+_pb2_grpc\.(\w+?Service)(Async)?(Stub|Servicer)\b")
# Every pod registers through the runtime's client of the scheduler.
_REGISTERS = ("tinsmith_runtime.rpc.scheduler_client", "(WorkerPod)")
_PROXY = "tinsmith_gateway"


@dataclass(frozen=True, slots=True)
class Box:
    """A package in the picture.

    Attributes:
        package: Its import name.
        parts: Its folders and modules, from the top layer to the ground.
        x: Left edge, in pixels.
        y: Upper edge, in pixels.
        width: In pixels.
    """

    package: str
    parts: tuple[str, ...]
    x: int
    y: int
    width: int

    @property
    def lines(self) -> int:
        """How many lines of parts it has."""
        return len(self.parts) if self.width == _WIDTH else min(_COLUMN, len(self.parts))

    @property
    def height(self) -> int:
        """Its height in pixels."""
        return _HEAD + _LINE * self.lines

    @property
    def middle(self) -> int:
        """The x coordinate of its middle, in pixels."""
        return self.x + self.width // 2


def read_layers() -> tuple[list[list[str]], dict[str, list[str]]]:
    """Return the rows of packages, top first, and the layers of each package."""
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    rows: list[list[str]] = []
    parts: dict[str, list[str]] = {}
    for section in contracts.sections():
        contract = contracts[section]
        if contract.get("type") != "layers":
            continue
        layers = contract["layers"].split("\n")[1:]
        if "containers" in contract:
            parts[contract["containers"].strip()] = layers
        else:
            rows = [layer.replace(" ", "").split("|") for layer in layers]
    return rows, parts


def sources(package: str) -> Iterator[str]:
    """Yield the sources of a package, without generated ones."""
    roots = (ROOT / "clients/python", *sorted((ROOT / "services").iterdir()))
    for root in roots:
        for path in sorted((root / package).rglob("*.py")):
            if "_pb2" not in path.name:
                yield path.read_text()


def read_calls(packages: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """Return the services that a package calls, by caller and pod."""
    servers: dict[str, str] = {}
    stubs: dict[str, set[str]] = {}
    for package in packages:
        stubs[package] = set()
        for source in sources(package):
            for service, _, kind in _STUB.findall(source):
                if kind == "Servicer":
                    servers[service] = package
                else:
                    stubs[package].add(service)
            if any(each in source for each in _REGISTERS):
                stubs[package] |= {"KeyService", "WorkerService"}
    calls: dict[tuple[str, str], list[str]] = {}
    for package in packages:
        # The proxy passes every service on; the runtime's calls are those of the pods.
        services = servers if package == _PROXY else stubs[package]
        for service in sorted(services):
            pod = servers.get(service)
            if pod not in (None, package) and package != "tinsmith_runtime":
                calls.setdefault((package, str(pod)), []).append(service.removesuffix("Service"))
    return calls


def read_imports(packages: Sequence[str]) -> set[tuple[str, str]]:
    """Return which package imports which."""
    graph = grimp.build_graph(*packages)
    found = set()
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            pair = (module.split(".")[0], imported.split(".")[0])
            if pair[0] != pair[1]:
                found.add(pair)
    return found


def place(rows: list[list[str]], parts: dict[str, list[str]]) -> list[Box]:
    """Return the boxes, each row below the one that may import it; a lone box is as wide as all."""
    total = max(len(row) for row in rows) * (_WIDTH + _GAP) - _GAP
    boxes: list[Box] = []
    y = _MARGIN
    for row in rows:
        width = _WIDTH if len(row) > 1 else total
        x = _MARGIN + (total - len(row) * (width + _GAP) + _GAP) // 2
        for package in row:
            # Parts that may not import each other share a layer; here each has a line.
            lines = [part.strip() for layer in parts.get(package, ()) for part in layer.split("|")]
            boxes.append(Box(package, tuple(lines), x, y, width))
            x += width + _GAP
        y = max(box.y + box.height for box in boxes) + _ROW_GAP
    return boxes


def draw_import(above: Box, below: Box, rank: int) -> str:
    """Return the arrow of an import, straight down where one of the boxes is wide.

    Args:
        above: The package that imports.
        below: The package that is imported.
        rank: Number of the row of `below`; moves the arrow, so that arrows stay apart.
    """
    narrow = below if below.width < above.width else above
    x = narrow.middle + (rank - 2) * 18
    return (
        f'<path class="import" d="M{x} {above.y + above.height} V{below.y - 3}" '
        'marker-end="url(#grey)"/>'
    )


def draw_call(caller: Box, pod: Box, services: Sequence[str]) -> str:
    """Return the arrow of gRPC calls, in a bow over or under the boxes; its title says which."""
    title = f"{caller.package} calls {', '.join(services)} of {pod.package}"
    if caller.y == pod.y:
        side = 1 if pod.x > caller.x else -1
        x1, x2, y = caller.middle + side * 24, pod.middle - side * 24, caller.y
        bow = y - 26 - abs(x2 - x1) // 14
        path = f"M{x1} {y} C{x1} {bow} {x2} {bow} {x2} {y - 3}"
    else:
        x = pod.middle + 60
        path = f"M{x} {caller.y} V{pod.y + pod.height + 3}"
    return f'<path class="call" d="{path}" marker-end="url(#blue)"><title>{title}</title></path>'


def draw_box(box: Box) -> Iterator[str]:
    """Yield the elements of a box."""
    yield f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="6"/>'
    yield f'<text class="name" x="{box.middle}" y="{box.y + 22}">{escape(box.package)}</text>'
    num_columns = -(-len(box.parts) // box.lines) if box.parts else 1
    for index, part in enumerate(box.parts):
        column, line = divmod(index, box.lines)
        x = box.x + box.width * (2 * column + 1) // (2 * num_columns)
        y = box.y + _HEAD + _LINE * line + 4
        yield f'<text x="{x}" y="{y}">{escape(part)}</text>'


def page() -> str:
    """Return the picture as SVG."""
    rows, parts = read_layers()
    boxes = place(rows, parts)
    by_package = {box.package: box for box in boxes}
    packages = list(by_package)
    width = max(box.x + box.width for box in boxes) + _MARGIN
    height = max(box.y + box.height for box in boxes) + _MARGIN + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<title>Packages, their folders, imports and gRPC calls</title>",
        "<style>text{font:11px sans-serif;text-anchor:middle;fill:#24292f}"
        ".name{font-weight:bold;font-size:12px}rect{fill:#f6f8fa;stroke:#57606a}"
        ".import,.call{fill:none}.import{stroke:#afb8c1}.call{stroke:#0969da;stroke-width:1.4}"
        ".ground{fill:#fff;stroke:none}.key{text-anchor:start}</style>",
        "<defs>",
        *(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="{colour}"/></marker>'
            for name, colour in (("grey", "#afb8c1"), ("blue", "#0969da"))
        ),
        "</defs>",
        f'<rect class="ground" width="{width}" height="{height}"/>',
    ]
    for above, below in sorted(read_imports(packages)):
        rank = next(index for index, row in enumerate(rows) if below in row)
        lines.append(draw_import(by_package[above], by_package[below], rank))
    for (caller, pod), services in sorted(read_calls(packages).items()):
        lines.append(draw_call(by_package[caller], by_package[pod], services))
    for box in boxes:
        lines += draw_box(box)
    y = height - 24
    lines += [
        f'<path class="import" d="M{_MARGIN} {y} h34" marker-end="url(#grey)"/>',
        f'<text class="key" x="{_MARGIN + 42}" y="{y + 4}">imports</text>',
        f'<path class="call" d="M{_MARGIN + 110} {y} h34" marker-end="url(#blue)"/>',
        f'<text class="key" x="{_MARGIN + 152}" y="{y + 4}">gRPC calls</text>',
        f'<text class="key" x="{_MARGIN + 240}" y="{y + 4}">Within a box, parts are layers: '
        "each imports only those after it (down the first column, then the next).</text>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
