"""What stands before every request: who may ask, from where, how much and how often.

A page on loopback is still reachable from every other page that the same browser shows. So the
name in `Host` must be ours (no foreign name that leads here), a request that a page makes must
come from our own page (`Origin`), and what changes or computes something must be JSON, which no
form can send; a browser also says itself where a request comes from (`Sec-Fetch-Site`), which
names those too that have no `Origin`. Off loopback a token is needed beside that.
"""

import asyncio
import hmac
import ipaddress
import secrets
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
OPEN = ("/health",)  # what needs no token
UNCOUNTED = ("/health", "/page/")  # what costs nothing, and is answered however many others wait
# Nothing but our own files: no foreign script, style, picture or frame, and nothing inline.
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
# Set as soon as whoever asks has gone: threads that compute for a request see it too.
GONE: ContextVar[asyncio.Event | None] = ContextVar("GONE", default=None)


def check_asker() -> None:
    """Nothing is computed for a client that has gone."""
    gone = GONE.get()
    if gone is not None and gone.is_set():
        raise Problem(499, "the client has gone", "gone")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much one request may ask for, how many are answered at once, and what is kept."""

    body_bytes: int = 2**20
    body_seconds: float = 30.0
    requests: int = 16
    tokens: int = 1024
    replay_characters: int = 400
    trace_bytes: int = 256 * 2**20
    traces: int = 256
    answer_bytes: int = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Door:
    """The names under which the server is reached, and the token that it wants."""

    names: frozenset[str] = LOOPBACK
    any_address: bool = False
    token: str | None = None

    @classmethod
    def at(cls, host: str, token: str | None = None) -> "Door":
        """The door of a server that is bound to `host`; off loopback there is always a token.

        One that is bound to all addresses is reached by any of them, which a foreign name that
        leads here is not.
        """
        name = host.strip("[]").lower()
        if is_loopback(name):
            return cls(names=LOOPBACK | {name}, token=token)
        everywhere = name in ("", "0.0.0.0", "::")
        needed = token or secrets.token_urlsafe(18)
        return cls(names=LOOPBACK | {name}, any_address=everywhere, token=needed)

    def knows(self, host: str) -> bool:
        name = name_in(host)
        return name in self.names or (self.any_address and is_address(name))

    def lets_in(self, given: str | None) -> bool:
        if self.token is None:
            return True
        # JSON can name a half of a character: it is as wrong as any other.
        return given is not None and hmac.compare_digest(
            given.encode(errors="surrogatepass"), self.token.encode()
        )


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(name: str) -> bool:
    """Whether a name or an address is this machine alone."""
    return name == "localhost" or (is_address(name) and ipaddress.ip_address(name).is_loopback)


def name_in(host: str) -> str:
    """The name in `name:port`; nothing where it is malformed."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def token_in(headers: Headers) -> str | None:
    """The token as a program sends it, or a browser that was given it."""
    kind, _, given = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return given.strip()
    try:
        cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return None
    return None if cookie is None else cookie.value


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How those who ask here speak: what a body may be, where the token stands, how to refuse.

    `refuse` makes an answer of the path that was asked and of what went wrong there.
    """

    bodies: frozenset[str] = frozenset({"application/json"})
    open: tuple[str, ...] = OPEN
    token: Callable[[Headers], str | None] = token_in
    refuse: Callable[[str, Exception], Response] = lambda path, error: answer_of(error)


class Guard:
    """Answers what must not reach the routes, and puts the safety headers on every answer."""

    def __init__(
        self, app: ASGIApp, door: Door, limits: Limits, manner: Manner | None = None
    ) -> None:
        self.app, self.door, self.limits = app, door, limits
        self.manner = manner or Manner()
        self.running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
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
            slow = Problem(408, "the body did not come in time: send it again", "slow")
            problem = refused if isinstance(refused, Problem) else slow
            answer = self.manner.refuse(scope["path"], problem)
            if problem.status == 503:
                answer.headers["Retry-After"] = "1"
            await answer(scope, receive, send_safely)
            return
        gone = asyncio.Event()
        GONE.set(gone)
        leaving = asyncio.ensure_future(_left(receive, gone))
        self.running += counted
        try:
            await self.app(scope, _replay(body, gone), send_safely)
        finally:
            self.running -= counted
            leaving.cancel()

    def _admit(self, scope: Scope) -> RedirectResponse | None:
        """Refuse a stranger; one who brings the token in the address gets it as a cookie."""
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:
            raise Problem(400, "send Content-Length or Transfer-Encoding, not both", "length")
        host = headers.get("host", "")
        if not self.door.knows(host):
            raise Problem(403, "this server is not known by that name (Host)", "host")
        origin = headers.get("origin")
        if origin is not None and _without_scheme(origin) != host.lower():
            raise Problem(403, "another page may not ask this server (Origin)", "origin")
        # A picture or a script of another page has no Origin; following a link is no harm.
        elsewhere = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if elsewhere and headers.get("sec-fetch-mode") != "navigate":
            raise Problem(403, "another page may not ask this server (Sec-Fetch-Site)", "origin")
        kinds = self.manner.bodies
        if scope["method"] == "POST" and _content_type(headers) not in kinds:
            wanted = " or ".join(sorted(kinds))
            raise Problem(415, f"send JSON (Content-Type: {wanted})", "json")
        if scope["path"] in self.manner.open or self.door.token is None:
            return None
        query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
        in_address = query.pop("token", None)
        if in_address is not None and self.door.lets_in(in_address):
            rest = f"?{urlencode(query)}" if query else ""
            # Never to another host, whatever the path begins with.
            redirect = RedirectResponse("/" + scope["path"].lstrip("/") + rest, 303)
            redirect.set_cookie(COOKIE, in_address, httponly=True, samesite="strict")
            return redirect
        if not self.door.lets_in(self.manner.token(headers)):
            raise Problem(401, "this needs the token: open the address that was printed", "token")
        return None

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body, or a refusal as soon as it is known to be too long."""
        most = self.limits.body_bytes
        long = Problem(413, f"the body is longer than {most} bytes: send less")
        told = Headers(scope=scope).get("content-length", "0")
        if not told.isdigit() or int(told) > most:
            raise long
        body = bytearray()
        while True:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > most:
                raise long
            if not message.get("more_body", False):
                return bytes(body)


def _without_scheme(origin: str) -> str:
    return origin.lower().partition("://")[2]


def _content_type(headers: Headers) -> str:
    return headers.get("content-type", "").split(";")[0].strip().lower()


async def _left(receive: Receive, gone: asyncio.Event) -> None:
    """Listens until the client goes."""
    while (await receive())["type"] != "http.disconnect":
        pass
    gone.set()


def _replay(body: bytes, gone: asyncio.Event) -> Receive:
    """The body that was read already, then that the client has gone, once it has."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        if waiting:
            return waiting.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    return next_message
