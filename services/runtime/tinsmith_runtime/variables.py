"""Which variables of a pod the programs of others may see.

They are named one by one: a variable that holds a secret has no name that gives it away.
"""

from __future__ import annotations

from collections.abc import Mapping

from tinsmith_runtime.errors import ConfigError

ALLOWED_VARIABLES = frozenset(
    {"PATH", "HOME", "USER", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "PYTHONPATH"}
    | {"PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "VIRTUAL_ENV"}
    | {"LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "OMP_NUM_THREADS", "MKL_NUM_THREADS"}
    | {"OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HOME"}
)
"""Where things are, the language, and numbers of threads."""


def allowed_variables(source: Mapping[str, str], further: frozenset[str]) -> dict[str, str]:
    """Return the variables that a program of others gets.

    Args:
        source: All variables.
        further: Names besides `ALLOWED_VARIABLES`.
    """
    names = ALLOWED_VARIABLES | further
    return {name: value for name, value in source.items() if name in names}


def parse_variables(setting: str, text: str) -> frozenset[str]:
    """Return the names of a setting, which are separated by commas.

    Raises:
        ConfigError: If one of them is a setting of a pod, which may be its key.
    """
    names = frozenset(filter(None, (name.strip() for name in text.split(","))))
    for name in sorted(names):
        if name.startswith("TINSMITH_"):
            raise ConfigError(f"{setting}: {name} is the pod's own")
    return names
