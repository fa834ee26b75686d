"""Makes images by the lines of their Dockerfile, and writes them as one OCI archive.

The base, an official image of Python, is in no package registry: a minimal Debian with Debian's
Python takes its place. Everything else is done as it is written, one layer for each image. It
mounts, so it wants a mount namespace of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import stat
import string
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.cluster.debian import run, say
from tests.support.dockerfiles import IMAGES, Image, Instruction, copy_sources

REPOSITORY = "localhost/tinsmith"
TAG = "test"
PODS = tuple(image.pod for image in IMAGES)
PAUSE = "localhost/pause:1"
"""What holds the namespaces of a pod."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_COMMAND_TIMEOUT_S = 1800
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_OPAQUE_ATTRIBUTE = "trusted.overlay.opaque"
_LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
_CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
_MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"


@dataclass
class Stage:
    """A root file system that is being made: what differs from the base, and settings."""

    folder: Path
    env: dict[str, str] = field(default_factory=lambda: {"PATH": _PATH})
    cwd: str = "/"
    user: str = ""
    entry_point: Sequence[str] = ()
    arguments: dict[str, str] = field(default_factory=dict)

    @property
    def changes(self) -> Path:
        return self.folder / "changes"

    @property
    def root(self) -> Path:
        return self.folder / "root"

    def inside(self, path: str) -> Path:
        """Return where a path of the image is on this machine."""
        return self.root / os.path.normpath(os.path.join(self.cwd, path)).lstrip("/")


def build_image(image: Image, base: Path, folder: Path) -> Stage:
    """Do what the Dockerfile says of an image, on a base; return its last stage.

    Raises:
        RuntimeError: If a line fails, with the end of what it wrote; or is of a kind unknown here.
    """
    stages: dict[str, Stage] = {}
    stage = Stage(folder / "none")
    for instruction in image.instructions:
        if instruction.word == "FROM":
            name = instruction.text.partition(" AS ")[2] or "last"
            stage = stages[name] = Stage(folder / name)
            _mount_stage(stage, base)
        else:
            _obey(instruction, stage, stages, image.arguments)
    return stage


def write_archive(images: Mapping[str, Stage], base: Path, pause: Path, target: Path) -> None:
    """Write images, and that of the pause, into one archive that `ctr images import` reads.

    Args:
        images: By name with tag.
        base: The root file system that they all are based on.
        pause: A static busybox.
        target: The archive.
    """
    folder = target.with_suffix(".oci")
    (folder / "blobs" / "sha256").mkdir(parents=True)
    base_layer = _write_layer(base, folder)
    entries = []
    for name, stage in images.items():
        config = {
            "Env": [f"{key}={value}" for key, value in stage.env.items()],
            "User": stage.user,
            "WorkingDir": stage.cwd,
            "Entrypoint": list(stage.entry_point),
        }
        layers = [base_layer, _write_layer(stage.changes, folder)]
        entries.append(_write_manifest(name, config, layers, folder))
    pause_root = folder.with_suffix(".pause")
    pause_root.mkdir()
    shutil.copy(pause, pause_root / "busybox")
    config = {"Entrypoint": ["/busybox", "sleep", "2147483647"]}
    entries.append(_write_manifest(PAUSE, config, [_write_layer(pause_root, folder)], folder))
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": entries}))
    (folder / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))
    with tarfile.open(target, "w") as archive:
        archive.add(folder, ".")
    shutil.rmtree(folder)


def _obey(
    instruction: Instruction,
    stage: Stage,
    stages: Mapping[str, Stage],
    arguments: Mapping[str, str],
) -> None:
    text = instruction.text
    match instruction.word:
        case "ARG":
            name, equals, default = text.partition("=")
            given = arguments.get(name, os.environ.get(name))
            # Without a value and a default it is not set, which is not the same as empty.
            if given is not None or equals:
                stage.arguments[name] = default.strip('"') if given is None else given
        case "WORKDIR":
            stage.cwd = text
            stage.inside(".").mkdir(parents=True, exist_ok=True)
        case "ENV":
            known = dict(stage.env)
            for entry in shlex.split(text):
                name, _, value = entry.partition("=")
                stage.env[name] = string.Template(value).substitute(known)
        case "COPY" if match := re.fullmatch(r"--from=(\w+) (\S+) (\S+)", text):
            source = stages[match[1]].inside(match[2])
            shutil.copytree(source, stage.inside(match[3]), symlinks=True)
        case "COPY":
            copy_sources(text, stage.inside("."))
        case "RUN":
            _run_line(text, stage)
        case "USER":
            stage.user = text
        case "ENTRYPOINT":
            stage.entry_point = json.loads(text)
        case word:
            raise RuntimeError(f"{word} is not known here: {text}")


def _mount_stage(stage: Stage, base: Path) -> None:
    for path in (stage.changes, stage.folder / "work", stage.root):
        path.mkdir(parents=True)
    layers = f"lowerdir={base},upperdir={stage.changes},workdir={stage.folder / 'work'}"
    # What differs must be whole in its folder, whatever the machine's defaults are.
    options = f"{layers},redirect_dir=off,metacopy=off"
    _mount("-t", "overlay", "overlay", "-o", options, str(stage.root))
    _mount("-t", "proc", "proc", str(stage.root / "proc"))
    _mount("--rbind", "/dev", str(stage.root / "dev"))


def _run_line(line: str, stage: Stage) -> None:
    settings = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("PIP_") or name.lower().endswith("_proxy")
    }
    environment = {**stage.env, **stage.arguments, **settings}
    command = f"cd {shlex.quote(stage.cwd)}; {line}"
    with _settings_of_machine(stage.root):
        done = subprocess.run(
            ["chroot", str(stage.root), "/bin/sh", "-euc", command],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{line}: {done.stdout[-2000:]}{done.stderr[-2000:]}")


@contextlib.contextmanager
def _settings_of_machine(root: Path) -> Iterator[None]:
    """Show how this machine reaches package registries: pip's settings, certificates, names."""
    listed = run([sys.executable, "-m", "pip", "config", "list"], cwd=Path("/"))
    named = re.findall(r"(?:file://)?(/[^\s'\"]+)", listed)
    shown: list[Path] = []
    made: list[Path] = []
    try:
        for path in dict.fromkeys(["/etc/pip.conf", "/etc/resolv.conf", _CERTIFICATES, *named]):
            source, target = Path(path), root / path.lstrip("/")
            if not source.exists():
                continue
            if not target.exists():
                made += [target, *(parent for parent in target.parents if not parent.exists())]
                target.parent.mkdir(parents=True, exist_ok=True)
                target.mkdir() if source.is_dir() else target.touch()
            _mount("--bind", str(source), str(target))
            shown.append(target)
        yield
    finally:
        for target in reversed(shown):
            run(["umount", target], cwd=Path("/"))
        for target in made:
            target.rmdir() if target.is_dir() else target.unlink()


def _mount(*arguments: str) -> None:
    run(["mount", *arguments], cwd=Path("/"))


def _write_layer(folder: Path, archive: Path) -> tuple[str, int]:
    """Write a folder as a layer; return its digest and its size."""
    temporary = archive / "layer"
    with tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as layer:
        for parent, folders, files in os.walk(folder):
            place = Path(parent)
            inside = place.relative_to(folder)
            if _is_opaque(place):
                layer.addfile(tarfile.TarInfo(str(inside / _OPAQUE)))
            links = [name for name in folders if (place / name).is_symlink()]
            if place != folder:
                layer.add(place, str(inside), recursive=False)
            for name in [*files, *links]:
                status = (place / name).lstat()
                # Overlays mark what is deleted so; layers do it by name.
                if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
                    layer.addfile(tarfile.TarInfo(str(inside / f"{_WHITEOUT}{name}")))
                else:
                    layer.add(place / name, str(inside / name), recursive=False)
    return _keep(temporary, archive)


def _is_opaque(folder: Path) -> bool:
    try:
        return os.getxattr(folder, _OPAQUE_ATTRIBUTE) == b"y"
    except OSError:
        return False


def _write_manifest(
    name: str, config: Mapping[str, object], layers: Sequence[tuple[str, int]], archive: Path
) -> Mapping[str, object]:
    """Write the manifest of an image; return its entry in the index."""
    document = {
        "architecture": "amd64",
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [digest for digest, _ in layers]},
    }
    config_entry = _descriptor(_CONFIG_TYPE, _write_blob(document, archive))
    layer_entries = [_descriptor(_LAYER_TYPE, layer) for layer in layers]
    manifest = {"schemaVersion": 2, "mediaType": _MANIFEST_TYPE}
    blob = _write_blob({**manifest, "config": config_entry, "layers": layer_entries}, archive)
    annotations = {"io.containerd.image.name": name}
    return {**_descriptor(_MANIFEST_TYPE, blob), "annotations": annotations}


def _descriptor(media_type: str, blob: tuple[str, int]) -> dict[str, object]:
    return {"mediaType": media_type, "digest": blob[0], "size": blob[1]}


def _write_blob(document: object, archive: Path) -> tuple[str, int]:
    temporary = archive / "blob"
    temporary.write_text(json.dumps(document))
    return _keep(temporary, archive)


def _keep(temporary: Path, archive: Path) -> tuple[str, int]:
    with temporary.open("rb") as data:
        digest = hashlib.file_digest(data, "sha256").hexdigest()
    size = temporary.stat().st_size
    temporary.rename(archive / "blobs" / "sha256" / digest)
    return f"sha256:{digest}", size


def main(base: Path, pause: Path, folder: Path) -> None:
    """Build the image of every pod into `<folder>/images.tar`."""
    images = {}
    for image in IMAGES:
        say(f"making the image of the {image.pod}")
        images[f"{REPOSITORY}/{image.pod}:{TAG}"] = build_image(image, base, folder / image.pod)
    say("writing the archive of the images")
    write_archive(images, base, pause, folder / "images.tar")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
