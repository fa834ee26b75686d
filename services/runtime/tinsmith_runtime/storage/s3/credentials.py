"""Credentials of an S3 store: from the first source that is configured."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from xml.etree import ElementTree

import urllib3
from minio.credentials.credentials import Credentials
from minio.credentials.providers import (
    AWSConfigProvider,
    IamAwsProvider,
    Provider,
    StaticProvider,
)

from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.storage.settings import StorageSettings

_REMEDY = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or MINIO_ACCESS_KEY and MINIO_SECRET_KEY), "
    "write a shared credentials file, or give the pod a role (AWS_WEB_IDENTITY_TOKEN_FILE and "
    "AWS_ROLE_ARN)"
)


class CredentialsError(Exception):
    """A source of credentials did not answer; it may do so later."""


class _TypedProvider(Provider):
    """Tells failures of a source from failures of the store."""

    def __init__(self, provider: Provider, source: str) -> None:
        self._provider = provider
        self._source = source

    def retrieve(self) -> Credentials:
        try:
            return self._provider.retrieve()
        except (ValueError, OSError, KeyError, ElementTree.ParseError) as error:
            raise CredentialsError(f"no credentials from {self._source}: {error}") from error
        except urllib3.exceptions.HTTPError as error:
            raise CredentialsError(
                f"no credentials from {self._source}: {type(error).__name__}"
            ) from error


def find_credentials(
    settings: StorageSettings, environment: Mapping[str, str], http: urllib3.PoolManager
) -> Provider:
    """Return where credentials come from.

    Args:
        settings: Say which source, or to look for one.
        environment: Variables.
        http: For sources that are servers.

    Raises:
        ConfigError: If the source, or every source, is not configured; says what is looked for.
    """
    sources: dict[str, Callable[[], Provider | None]] = {
        "environment": lambda: _from_environment(environment),
        "web_identity": lambda: _from_web_identity(settings, environment, http),
        "file": lambda: _from_file(settings, environment),
        "container": lambda: _from_container(environment, http),
    }
    if settings.credentials == "instance":
        return _TypedProvider(IamAwsProvider(http_client=http), "the instance's role")
    if settings.credentials != "auto":
        provider = sources[settings.credentials]()
        if provider is None:
            raise ConfigError(f"s3 credentials={settings.credentials} is not configured; {_REMEDY}")
        return provider
    for find in sources.values():
        provider = find()
        if provider is not None:
            return provider
    raise ConfigError(f"no credentials for the S3 store; {_REMEDY}")


def _from_environment(environment: Mapping[str, str]) -> Provider | None:
    for key_name, secret_name, token_name in (
        ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
        ("MINIO_ACCESS_KEY", "MINIO_SECRET_KEY", ""),
    ):
        key, secret = environment.get(key_name, ""), environment.get(secret_name, "")
        if bool(key) != bool(secret):
            raise ConfigError(f"of {key_name} and {secret_name} one is not set; set both or none")
        if key:
            return StaticProvider(key, secret, environment.get(token_name) or None)
    return None


def _from_web_identity(
    settings: StorageSettings, environment: Mapping[str, str], http: urllib3.PoolManager
) -> Provider | None:
    token_file = environment.get("AWS_WEB_IDENTITY_TOKEN_FILE")
    if not token_file:
        return None
    if not Path(token_file).is_file():
        raise ConfigError(
            f"AWS_WEB_IDENTITY_TOKEN_FILE {token_file} does not exist; mount the token of the "
            "service account"
        )
    provider = IamAwsProvider(
        custom_endpoint=settings.sts_endpoint or None,
        http_client=http,
        token_file=token_file,
        role_arn=environment.get("AWS_ROLE_ARN"),
        region=settings.region,
    )
    return _TypedProvider(provider, "the web identity's role")


def _from_file(settings: StorageSettings, environment: Mapping[str, str]) -> Provider | None:
    home = environment.get("HOME") or os.path.expanduser("~")
    path = environment.get("AWS_SHARED_CREDENTIALS_FILE") or f"{home}/.aws/credentials"
    if not Path(path).is_file():
        return None
    profile = settings.profile or environment.get("AWS_PROFILE") or "default"
    provider = _TypedProvider(AWSConfigProvider(path, profile), f"the file {path}")
    try:
        provider.retrieve()
    except CredentialsError as error:
        raise ConfigError(f"{error}; add the profile or set AWS_PROFILE") from error
    return provider


def _from_container(environment: Mapping[str, str], http: urllib3.PoolManager) -> Provider | None:
    relative = environment.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    full = environment.get("AWS_CONTAINER_CREDENTIALS_FULL_URI")
    if not relative and not full:
        return None
    provider = IamAwsProvider(http_client=http, relative_uri=relative, full_uri=full)
    return _TypedProvider(provider, "the container's role")
