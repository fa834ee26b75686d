"""The version of the package, as its metadata has it."""

from importlib import metadata

try:
    __version__ = metadata.version("tinsmith")
except metadata.PackageNotFoundError:  # Run from a source tree that is not installed.
    __version__ = "0+source"
