"""Middleware in front of the routes: access checks, size limits and security headers.

Any page open in the same browser can reach a server on loopback. Therefore `Host` must be a known
name (against DNS rebinding), `Origin` must be the server itself (against cross-site requests), and
a POST body must be JSON, which an HTML form cannot send. `Sec-Fetch-Site` covers cross-site
requests without `Origin`. A server that is not bound to loopback also requires a token.
"""

import asyncio
import hmac
import ipaddress
import secrets
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manyheads.web.responses import Problem, answer_of

COOKIE = "manyheads-token"
OPEN = ("/health",)  # paths that need no token
UNCOUNTED = ("/health", "/page/")  # cheap paths, exempt from the limit on concurrent requests
# Allow only files from this server: no external scripts, styles, images or frames, nothing inline.
POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
# Set when the client disconnects; worker threads of the request see the same variable.
GONE: ContextVar[asyncio.Event | None] = ContextVar("GONE", default=None)


def check_client() -> None:
    """Raise if the client of the current request has disconnected."""
    gone = GONE.get()
    if gone is not None and gone.is_set():
        raise Problem(499, "the client has gone", "gone")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits per request, on concurrent requests, and on the traces kept in memory."""

    body_bytes: int = 2**20
    body_seconds: float = 30.0
    requests: int = 16
    tokens: int = 1024
    replay_characters: int = 400
    trace_bytes: int = 256 * 2**20
    traces: int = 256
    answer_bytes: int = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class AccessPolicy:
    """The host names that the server accepts, and the token that it requires."""

    names: frozenset[str] = LOOPBACK
    any_address: bool = False
    token: str | None = None

    @classmethod
    def at(cls, host: str, token: str | None = None) -> "AccessPolicy":
        """The policy of a server bound to `host`; outside loopback a token is always required.

        A server bound to all addresses accepts any IP address as `Host`, but no unknown name.
        """
        name = host.strip("[]").lower()
        if is_loopback(name):
            return cls(names=LOOPBACK | {name}, token=token)
        everywhere = name in ("", "0.0.0.0", "::")
        needed = token or secrets.token_urlsafe(18)
        return cls(names=LOOPBACK | {name}, any_address=everywhere, token=needed)

    @property
    def is_local(self) -> bool:
        """True if only this computer can reach the server."""
        return not self.any_address and all(map(is_loopback, self.names))

    def knows(self, host: str) -> bool:
        name = name_in(host)
        return name in self.names or (self.any_address and is_address(name))

    def lets_in(self, candidate: str | None) -> bool:
        if self.token is None:
            return True
        # A token from JSON may contain a lone surrogate, which is simply a wrong token.
        return candidate is not None and hmac.compare_digest(
            candidate.encode(errors="surrogatepass"), self.token.encode()
        )


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(name: str) -> bool:
    """True if a name or address is loopback."""
    return name == "localhost" or (is_address(name) and ipaddress.ip_address(name).is_loopback)


def name_in(host: str) -> str:
    """The name in `name:port`; empty if it is malformed."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def token_in(headers: Headers) -> str | None:
    """The token from the `Authorization` header (programs) or from the cookie (browsers)."""
    kind, _, credentials = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return credentials.strip()
    try:
        cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return None
    return None if cookie is None else cookie.value


@dataclass(frozen=True, kw_only=True)
class ApiStyle:
    """Conventions of an API: accepted content types, paths without token, token, error format.

    `refuse` builds the error response from the requested path and the exception.
    """

    bodies: frozenset[str] = frozenset({"application/json"})
    open: tuple[str, ...] = OPEN
    token: Callable[[Headers], str | None] = token_in
    refuse: Callable[[str, Exception], Response] = lambda path, error: answer_of(error)


class Guard:
    """ASGI middleware that rejects bad requests and adds security headers to every response."""

    def __init__(
        self,
        app: ASGIApp,
        policy: AccessPolicy,
        limits: Limits,
        style: ApiStyle | None = None,
        observe: Callable[[str, int, float], None] = lambda path, status, seconds: None,
    ) -> None:
        self.app, self.policy, self.limits, self.observe = app, policy, limits, observe
        self.style = style or ApiStyle()
        self.running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        start = time.monotonic()

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
                self.observe(scope["path"], message["status"], time.monotonic() - start)
            await send(message)

        try:
            if redirect := self._admit(scope):
                await redirect(scope, receive, send_safely)
                return
            async with asyncio.timeout(self.limits.body_seconds):
                body = await self._body(scope, receive)
            counted = not scope["path"].startswith(UNCOUNTED)
            if counted and self.running >= self.limits.requests:
                raise Problem(503, "too many requests at once: try again", "busy")
        except (Problem, TimeoutError) as refused:
            slow = Problem(408, "timeout while reading the body: send it again", "slow")
            problem = refused if isinstance(refused, Problem) else slow
            answer = self.style.refuse(scope["path"], problem)
            if problem.status == 503:
                answer.headers["Retry-After"] = "1"
            await answer(scope, receive, send_safely)
            return
        gone = asyncio.Event()
        GONE.set(gone)
        disconnect = asyncio.ensure_future(_wait_for_disconnect(receive, gone))
        self.running += counted
        try:
            await self.app(scope, _replay(body, gone), send_safely)
        finally:
            self.running -= counted
            disconnect.cancel()

    def _admit(self, scope: Scope) -> RedirectResponse | None:
        """Check host, origin, content type and token; move a token in the URL into a cookie."""
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:
            raise Problem(400, "send Content-Length or Transfer-Encoding, not both", "length")
        host = headers.get("host", "")
        if not self.policy.knows(host):
            raise Problem(403, "the server does not accept this host name (Host)", "host")
        origin = headers.get("origin")
        if origin is not None and _without_scheme(origin) != host.lower():
            raise Problem(403, "cross-site requests are refused (Origin)", "origin")
        # Images and scripts that another page loads send no Origin. Following a link is harmless.
        cross_site = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if cross_site and headers.get("sec-fetch-mode") != "navigate":
            raise Problem(403, "cross-site requests are refused (Sec-Fetch-Site)", "origin")
        kinds = self.style.bodies
        if scope["method"] == "POST" and _content_type(headers) not in kinds:
            accepted = " or ".join(sorted(kinds))
            raise Problem(415, f"send JSON (Content-Type: {accepted})", "json")
        if scope["path"] in self.style.open or self.policy.token is None:
            return None
        query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
        in_address = query.pop("token", None)
        if in_address is not None and self.policy.lets_in(in_address):
            rest = f"?{urlencode(query)}" if query else ""
            # Strip leading slashes: //evil.example must not redirect to another host.
            redirect = RedirectResponse("/" + scope["path"].lstrip("/") + rest, 303)
            redirect.set_cookie(COOKIE, in_address, httponly=True, samesite="strict")
            return redirect
        if not self.policy.lets_in(self.style.token(headers)):
            raise Problem(401, "token required: open the URL printed at start", "token")
        return None

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """Read the body; raise as soon as it exceeds the limit."""
        limit = self.limits.body_bytes
        too_long = Problem(413, f"the body is longer than {limit} bytes: send less")
        length = Headers(scope=scope).get("content-length", "0")
        if not length.isdigit() or int(length) > limit:
            raise too_long
        body = bytearray()
        while True:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > limit:
                raise too_long
            if not message.get("more_body", False):
                return bytes(body)


def _without_scheme(origin: str) -> str:
    return origin.lower().partition("://")[2]


def _content_type(headers: Headers) -> str:
    return headers.get("content-type", "").split(";")[0].strip().lower()


async def _wait_for_disconnect(receive: Receive, gone: asyncio.Event) -> None:
    """Set `gone` when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
    gone.set()


def _replay(body: bytes, gone: asyncio.Event) -> Receive:
    """A `receive` that returns the body already read, then the disconnect message."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        if waiting:
            return waiting.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    return next_message
