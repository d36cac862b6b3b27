"""The user's settings for etcd, checked before anything is sent.

The names are those of torch's two etcd back ends, which differ from each other: `protocol`, `cert` or `ssl_cert`,
`key` or `ssl_cert_key`, `cacert` or `ca_cert`, `etcd_prefix`.  `user`, `password` and `password_file` are ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote

from aelastic.base.record import Record
from aelastic.errors import InputError
from aelastic.rdzv.settings import RendezvousSettings

if TYPE_CHECKING:
    import ssl

DEFAULT_PORT = 2379
DEFAULT_PREFIX = "/aelastic"
_HOST_AND_PORT = re.compile(r"(?:\[(?P<v6>[^\[\]/@\s]+)\]|(?P<host>[^\[\]:/@?#\s]+))(?::(?P<port>[0-9]+))?")


class Endpoint(Record):
    """One member of an etcd cluster."""

    scheme: str
    host: str  # as the user wrote it, without the brackets of IPv6
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class EtcdSettings(Record):
    """The user's settings, checked."""

    endpoints: tuple[Endpoint, ...]
    tls: ssl.SSLContext | None
    user: str  # empty: no user
    password: str
    prefix: str  # starts with a slash, but does not end with one

    def key(self, run_id: str) -> str:
        """Returns the key of a run id, which may be any text: characters with a meaning in a path are escaped."""
        name = quote(run_id, safe="", errors="surrogatepass")
        if not name.strip("."):  # etcd v2 would normalize such a path
            name = name.replace(".", "%2E") or "%"
        return f"{self.prefix}/{name}/coordinator"


def etcd_settings(settings: RendezvousSettings) -> EtcdSettings:
    """Reads and checks the user's settings, and the files that they name.

    Raises:
        InputError: a value cannot work; the message names it and the fix.
    """
    config = settings.config
    cert, key, cacert = (config.get(name) or config.get(other, "") for name, other in _SPELLINGS)
    protocol = config.get("protocol", "").lower()
    if protocol not in {"", "http", "https"}:
        raise InputError(f"rendezvous setting protocol={config['protocol']}: use http or https")
    # Certificates imply TLS; torch would silently do without.
    default = protocol or ("https" if cert or key or cacert else "http")
    endpoints = tuple(
        _endpoint(text.strip(), protocol, default) for text in settings.endpoint.split(",") if text.strip()
    )
    if not endpoints:
        raise InputError("etcd needs an endpoint: use host:port, or several separated by commas")
    user, password = _credentials(config)
    return EtcdSettings(
        endpoints=endpoints,
        tls=_tls(cert, key, cacert) if any(endpoint.scheme == "https" for endpoint in endpoints) else None,
        user=user,
        password=password,
        prefix=_prefix(config.get("etcd_prefix", DEFAULT_PREFIX)),
    )


_SPELLINGS = (("cert", "ssl_cert"), ("key", "ssl_cert_key"), ("cacert", "ca_cert"))


def _endpoint(text: str, protocol: str, default: str) -> Endpoint:
    scheme, _, rest = text.rpartition("://")
    if "@" in rest:  # not shown: it contains a password
        raise InputError("an etcd endpoint contains a user: use the rendezvous settings user and password_file")
    match = _HOST_AND_PORT.fullmatch(rest.removesuffix("/"))
    port = int(match["port"] or DEFAULT_PORT) if match and len(match["port"] or "") < 6 else 0
    if not match or not 0 < port < 2**16 or (match["v6"] and ":" not in match["v6"]):
        raise InputError(f"etcd endpoint {text}: use host:port, with an IPv6 address in brackets: [::1]:{DEFAULT_PORT}")
    if scheme.lower() not in {"", "http", "https"}:
        raise InputError(f"etcd endpoint {text}: use http:// or https://, or neither")
    if scheme and protocol and scheme.lower() != protocol:
        raise InputError(
            f"etcd endpoint {text}contradicts the rendezvous setting protocol={protocol}: set the protocol once"
        )
    return Endpoint(scheme=scheme.lower() or default, host=match["v6"] or match["host"], port=port)


def _credentials(config: Mapping[str, str]) -> tuple[str, str]:
    user, separator, password = config.get("user", "").partition(":")
    given = [name for name in ("password", "password_file") if name in config] + (["user=name:…"] if separator else [])
    if len(given) > 1:
        raise InputError(f"the password of etcd's user is given twice, by {' and '.join(given)}: give it once")
    if given and not user:
        raise InputError(f"rendezvous setting {given[0]} without a user: add user=NAME")
    if user and not given:
        raise InputError(f"rendezvous setting user={user} without a password: add password_file=FILE, or password=…")
    if "password_file" in config:
        path = config["password_file"]
        try:
            with open(path, encoding="utf-8") as file:
                return user, file.read().rstrip("\r\n")
        except (OSError, ValueError) as error:
            raise InputError(f"rendezvous setting password_file={path}: {_reason(error)}") from None
    return user, config.get("password", password)


def _prefix(text: str) -> str:
    parts = text.strip("/").split("/")
    if any(part in {"", ".", ".."} for part in parts) or not text.isprintable():
        raise InputError(f"rendezvous setting etcd_prefix={text!r}: use a path such as {DEFAULT_PREFIX}")
    return "/" + "/".join(parts)


def _tls(cert: str, key: str, cacert: str) -> ssl.SSLContext:
    import ssl

    if key and not cert:
        raise InputError("rendezvous setting key without cert: add cert=FILE")
    try:
        context = ssl.create_default_context(cafile=cacert or None)
    except (OSError, ValueError) as error:
        raise InputError(f"rendezvous setting cacert={cacert}: {_reason(error)}: use a PEM file of CAs") from None
    if cert:
        try:
            context.load_cert_chain(cert, key or None, password="")  # without a password, it would ask at the terminal
        except (OSError, ValueError) as error:
            what = f"cert={cert}" + (f",key={key}" if key else "")
            raise InputError(
                f"rendezvous setting {what}: {_reason(error)}: use PEM files of a certificate and its unencrypted key"
            ) from None
    return context


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
