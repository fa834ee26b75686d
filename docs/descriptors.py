"""The contract with its comments, as protoc reads it: what the pages of reference are made of."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc_tools
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

ROOT = Path(__file__).parents[1]
_FOLDER = ROOT / "proto/tinsmith/v1"
# Numbers of fields of descriptor.proto, of which the paths of comments consist.
FILE_MESSAGE, FILE_ENUM, FILE_SERVICE = 4, 5, 6
MESSAGE_FIELD, MESSAGE_NESTED, MESSAGE_ENUM, ENUM_VALUE, SERVICE_METHOD = 2, 3, 4, 2, 2


class Comments:
    """The comments of one file, by the path of what they stand above."""

    def __init__(self, file: descriptor_pb2.FileDescriptorProto) -> None:
        self._by_path = {
            tuple(location.path): location.leading_comments
            for location in file.source_code_info.location
        }
        # The comment above the first statement is detached from it: it is that of the file.
        self.of_file = next(
            (
                comment
                for location in file.source_code_info.location
                for comment in (*location.leading_detached_comments, location.leading_comments)
                if comment
            ),
            "",
        )

    def __getitem__(self, path: Sequence[int]) -> str:
        """Return the comment without its indentation; empty if there is none."""
        lines = self._by_path.get(tuple(path), "").splitlines()
        return "\n".join(line.removeprefix(" ") for line in lines).strip()


def files() -> Iterator[tuple[descriptor_pb2.FileDescriptorProto, Comments]]:
    """Yield each file of the contract, in the order of their names, with its comments."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "set.binpb"
        done = protoc.main(
            [
                "protoc",
                f"-I{ROOT / 'proto'}",
                f"-I{Path(grpc_tools.__file__).parent / '_proto'}",
                "--include_source_info",
                f"--descriptor_set_out={written}",
                *(str(path) for path in sorted(_FOLDER.glob("*.proto"))),
            ]
        )
        if done != 0:
            raise RuntimeError(f"protoc ended with {done}")
        found = descriptor_pb2.FileDescriptorSet.FromString(written.read_bytes())
    for file in sorted(found.file, key=lambda each: each.name):
        yield file, Comments(file)
