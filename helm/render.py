"""Write what is generated from the sources of the chart, or check that it is fresh.

`k8s/crd` is copied into the chart, where Helm looks for it. The schema of the values gets the
settings of the pods. The chart is rendered into `k8s/install.yaml`, for people who use kubectl
alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import helm_python
import yaml
from helm.settings_schema import with_settings

ROOT = Path(__file__).parents[1]
CHART = ROOT / "helm/tinsmith"
VALUES = CHART / "ci/external-values.yaml"
NAME = "tinsmith"
_RENDERED_VERSION = "1.24.0"
_HEADER = f"""\
# Made by `make manifests` from helm/{NAME} with {VALUES.relative_to(ROOT)}: change those.
# For Kubernetes {_RENDERED_VERSION} and newer. README.md says what has to be there first.
"""
_LINTED_VERSIONS = ("v1.20.2", "v1.31.0")
_WARNING = 2


class ChartError(Exception):
    """The chart has mistakes; the message lists them."""


def generated_files(kubernetes: str = _RENDERED_VERSION) -> dict[Path, str]:
    """Return the content of each generated file.

    Args:
        kubernetes: Version of the API server that the manifests are for.

    Raises:
        ChartError: If Helm finds fault with the chart.
    """
    files = {
        CHART / "crds" / source.name: source.read_text()
        for source in sorted((ROOT / "k8s/crd").glob("*.yaml"))
    }
    schema = CHART / "values.schema.json"
    files[schema] = json.dumps(with_settings(json.loads(schema.read_text())), indent=2) + "\n"
    values = yaml.safe_load(VALUES.read_text())
    _lint(values)
    with helm_python.Chart.load(CHART) as chart:
        versioned = {**values, "kubernetesVersion": kubernetes}
        rendered = chart.render(versioned, name=NAME, namespace=NAME)
    texts = [
        f"# {path.removeprefix(f'{NAME}/')}\n{_without_blanks(text)}"
        for path, text in sorted(rendered.items())
        # `helm test` alone runs those; `kubectl apply` would at once.
        if path.endswith(".yaml") and "/templates/tests/" not in path and text.strip()
    ]
    # Helm is not what manages objects that kubectl applies.
    manifests = "---\n".join(texts).replace("managed-by: Helm", "managed-by: kubectl")
    files[ROOT / "k8s/install.yaml"] = _HEADER + "---\n" + manifests
    return files


def main() -> int:
    """Return the exit code of the process."""
    parser = argparse.ArgumentParser(description="Generate the manifests of k8s/ and the chart.")
    parser.add_argument("--check", action="store_true", help="fail if a file is stale")
    arguments = parser.parse_args()
    try:
        files = generated_files()
    except (ChartError, helm_python.HelmError) as error:
        print(f"the chart cannot be rendered: {error}", file=sys.stderr)
        return 1
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    folder = CHART / "crds"
    stale += [path for path in folder.glob("*") if path not in files]
    if arguments.check:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale: run make manifests", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        if path in files:
            path.parent.mkdir(exist_ok=True)
            path.write_text(files[path])
        else:
            path.unlink()
    return 0


def _lint(values: dict[str, object]) -> None:
    for version in _LINTED_VERSIONS:
        versioned = {**values, "kubernetesVersion": version.removeprefix("v")}
        report = helm_python.lint(CHART, versioned, strict=True, kube_version=version)
        problems = [
            f"{message['path']}: {message['error']}"
            for message in report["messages"]
            if message["severity"] >= _WARNING
        ]
        if problems or report["errors"]:
            raise ChartError("; ".join(problems or report["errors"]))


def _without_blanks(text: str) -> str:
    lines = [line.rstrip() for line in text.strip().splitlines() if line.strip()]
    return "\n".join(lines).removeprefix("---\n") + "\n"


if __name__ == "__main__":
    sys.exit(main())
