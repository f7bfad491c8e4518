"""Asking another computer for a score: JSON over HTTP, with retries that know which failures may pass.

Scores come from the cluster more often than from beyond it, and a proxy that the environment names for something else
would swallow the requests. So they go straight to the address, unless the option `proxy` says otherwise.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import re
import urllib.request
from collections.abc import Mapping
from typing import Annotated, Any

import httpx
from pydantic import Field

from megarl.errors import UserError
from megarl.settings import user_path

RETRIED = frozenset((408, 409, 425, 429, 500, 502, 503, 504))
LONGEST_WAIT_S = 30.0
ENVIRONMENT = "environment"
INSIDE = (".localhost", ".local", ".internal", ".svc", ".cluster.local")

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Wait = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ServiceFailure(Exception):
    """No score could be had; the message says why."""


class JsonClient:
    """POSTs JSON to one address.

    retries: further attempts after the first, for refused and broken connections, time-outs and the status
        codes in RETRIED; waits grow from `backoff_s` by doubling, with jitter, and follow `Retry-After`.
    timeout_s: of one attempt. concurrency: requests under way at once. token_file: a file holding a bearer token.
    proxy: the address of a proxy; "environment" for the one that HTTP_PROXY, HTTPS_PROXY or ALL_PROXY names, but not
        for hosts in NO_PROXY, on loopback, or of the cluster (see `is_inside`); None for none, whatever is there.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        retries: int,
        backoff_s: float,
        concurrency: int,
        headers: Mapping[str, str] | None = None,
        token_file: str | None = None,
        proxy: str | None = None,
    ) -> None:
        self.url = url
        self.retries = retries
        self.backoff_s = backoff_s
        token = {"Authorization": f"Bearer {_token(token_file)}"} if token_file is not None else {}
        self._client = httpx.AsyncClient(
            timeout=timeout_s, headers={**(headers or {}), **token}, **_way(url, proxy)
        )
        self._unused = proxy_of_the_environment(url) if proxy is None else None
        self._slots = asyncio.Semaphore(concurrency)

    async def post(self, body: Any) -> Any:
        """Return the decoded JSON of the answer. Raises ServiceFailure."""
        async with self._slots:
            for attempt in range(self.retries + 1):
                failure, wait_s = await self._attempt(body)
                if not isinstance(failure, str):
                    return failure["json"]
                if wait_s is None or attempt == self.retries:
                    raise ServiceFailure(f"{self.url}: {failure} (attempt {attempt + 1})")
                grown = self.backoff_s * 2**attempt * random.uniform(0.5, 1.5)
                await asyncio.sleep(min(max(grown, wait_s), LONGEST_WAIT_S))
        raise AssertionError("unreachable")

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _attempt(self, body: Any) -> tuple[dict[str, Any] | str, float | None]:
        """Return ({"json": answer}, None), or what failed and the least seconds to wait (None: don't try again)."""
        try:
            answer = await self._client.post(self.url, json=body)
        except httpx.TransportError as error:
            connecting = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
            hint = f" (not tried through {self._unused}: `proxy: {ENVIRONMENT}` would)"
            return f"{type(error).__name__}: {error}{hint if connecting and self._unused else ''}", 0.0
        if answer.status_code in RETRIED:
            return f"status {answer.status_code}", _retry_after(answer)
        if answer.status_code != 200:
            return f"status {answer.status_code}: {answer.text[:200]}", None
        try:
            return {"json": answer.json()}, None
        except ValueError as error:
            return f"the answer is not JSON: {error}", None


def _retry_after(answer: httpx.Response) -> float:
    try:
        return float(answer.headers.get("Retry-After", 0))
    except ValueError:
        return 0.0  # a date


def is_inside(host: str) -> bool:
    """Return whether a host is this machine or, by its name, one of the cluster; no proxy leads there.

    Loopback addresses, names without a dot, and those that end as in INSIDE.
    """
    address = _address(host)
    if address is not None:
        return address.is_loopback or address.is_unspecified
    name = host.lower().rstrip(".")
    return "." not in name or name.endswith(INSIDE)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def proxy_of_the_environment(url: str) -> str | None:
    """Return the name of the variable whose proxy would be used for this address, if it were asked for."""
    parsed, proxies = httpx.URL(url), urllib.request.getproxies()
    scheme = next((scheme for scheme in (parsed.scheme, "all") if proxies.get(scheme)), None)
    excepted = any(_matches(parsed.host, entry.strip()) for entry in proxies.get("no", "").split(","))
    return None if scheme is None or excepted or is_inside(parsed.host) else f"{scheme.upper()}_PROXY"


def _matches(host: str, entry: str) -> bool:
    """Return whether an entry of NO_PROXY (a name with what is below it, an address, a network, `*`) is for a host."""
    if entry == "*":
        return True
    name, colon, port = entry.rpartition(":")
    entry = name if colon and port.isdigit() and ":" not in name.strip("[]") else entry
    address = _address(host)
    if address is not None:
        try:
            return address in ipaddress.ip_network(entry.strip("[]"), strict=False)
        except ValueError:
            return False
    entry = entry.lower().removeprefix("*").lstrip(".")
    return bool(entry) and (host.lower() == entry or host.lower().endswith(f".{entry}"))


def _way(url: str, proxy: str | None) -> dict[str, Any]:
    """Return the settings of an httpx client that connects as `proxy` says. Certificates are as SSL_CERT_FILE says."""
    if proxy == ENVIRONMENT:
        variable = proxy_of_the_environment(url)
        proxies = urllib.request.getproxies()
        proxy = proxies[variable.removesuffix("_PROXY").lower()] if variable else None
        proxy = proxy if proxy is None or "://" in proxy else f"http://{proxy}"
    return {"proxy": proxy, "trust_env": False, "verify": httpx.create_ssl_context()}


def _token(path: str) -> str:
    try:
        token = user_path(path, "token_file").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"token_file {path!r} cannot be read: {error}") from error
    if not token or not token.isprintable() or not token.isascii():
        raise UserError(f"token_file {path!r} holds no token: one line of ASCII is needed")
    return token


def check_url(url: str, key: str = "url") -> None:
    """Raise UserError unless this is the address of an HTTP server. key: how the setting is called."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UserError(
            f"{key} {url!r}: {error}; an IPv6 address stands in brackets, http://[::1]:8000"
        ) from error
    if parsed.scheme not in ("http", "https") or not parsed.host or re.search(r"\s", url):
        raise UserError(f"{key} {url!r} must begin with http:// or https:// and name a host")
    if parsed.port is not None and not 0 < parsed.port < 65536:
        raise UserError(f"{key} {url!r}: no port is {parsed.port}")


def check_http(
    *,
    url: str,
    headers: Mapping[str, str] | None = None,
    token_file: str | None = None,
    proxy: str | None = None,
    **_: object,
) -> None:
    """Refuse an address, headers, a token or a proxy that cannot work; for `@verifier(check=...)`."""
    check_url(url)
    for name, value in (headers or {}).items():
        if not re.fullmatch(r"[\w!#$%&'*+.^`|~-]+", name, re.ASCII) or re.search(r"[^\t -~]", value):
            raise UserError(f"headers: {name!r}: {value!r} is no header of printable ASCII")
    if token_file is not None:
        _token(token_file)
        if any(name.lower() == "authorization" for name in headers or {}):
            raise UserError("token_file and an Authorization header in headers: set one of them")
    if proxy is not None and proxy != ENVIRONMENT and "://" not in proxy:
        raise UserError(f"proxy {proxy!r} must be an address such as http://host:3128, or {ENVIRONMENT!r}")
    try:
        httpx.Client(**_way(url, proxy)).close()
    except (ImportError, ValueError, OSError, httpx.InvalidURL) as error:
        raise UserError(f"proxy {proxy!r}: no connection can be made so: {error}") from error
