"""Who this process is to the API server: the official client's configuration, and the same for kopf's watches.

A service account's token is renewed by Kubernetes, a kubeconfig's by a plugin, an identity provider or whoever writes
the file. The client's loaders read all of them; a `Configuration` asks its hook before every call.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable

import kopf
import yaml
from kubernetes.aio import config
from kubernetes.aio.client.configuration import Configuration

RELOAD_SECONDS = 60.0
BEARER = "BearerToken"
"""The client's name for what stands in the Authorization header, scheme included."""


async def login() -> Configuration:
    """The service account's credentials in a cluster, else those of the kubeconfig.

    Raises:
        RuntimeError: there are none, or they can't be read; says why.
    """
    configuration = Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException as missing:
        path = os.environ.get("KUBECONFIG") or config.KUBE_CONFIG_DEFAULT_LOCATION
        try:
            # What a plugin answers is not written into anybody's file.
            loader = await config.load_kube_config(path, client_configuration=configuration, persist_config=False)
        # ValueError and TypeError: what the loader makes of a half-written file.
        except (config.ConfigException, OSError, ValueError, TypeError, yaml.YAMLError) as error:
            told = f"in a cluster: {missing}; from {path}: {error}"
            raise RuntimeError(f"no Kubernetes credentials: run in a cluster, or set KUBECONFIG ({told})") from error
        configuration.refresh_api_key_hook = _reloading(loader.load_and_set)
    return configuration


def _reloading(load: Callable[[Configuration], Awaitable[None]]) -> Callable[[Configuration], Awaitable[None]]:
    """A hook that reads a kubeconfig's token again; the loader asks a plugin only when its last answer runs out."""
    read = time.monotonic()

    async def reload(configuration: Configuration) -> None:
        nonlocal read
        if time.monotonic() - read >= RELOAD_SECONDS:
            # Noted first: many calls ask at once, and only one of them needs to read.
            read = time.monotonic()
            await load(configuration)

    return reload


async def connection(configuration: Configuration) -> kopf.ConnectionInfo:
    """The connection that kopf uses for its own sessions. It asks anew when the API server has answered 401."""
    header = await configuration.get_api_key_with_prefix(BEARER) or ""
    scheme, _, token = header.rpartition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        scheme=scheme or None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        proxy_url=configuration.proxy,
    )
