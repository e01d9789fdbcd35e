"""The same routes and the same page without TensorBoard: a small server on this machine only."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tensorboard import context as tensorboard_context
from tensorboard.plugins import base_plugin
from werkzeug import serving, wrappers

from tensorboard_plugin_gradflow.cache import TensorCache
from tensorboard_plugin_gradflow.drafts import WithDrafts
from tensorboard_plugin_gradflow.eventlog import EventLog, Progress
from tensorboard_plugin_gradflow.plugin import GradflowPlugin
from tensorboard_plugin_gradflow.source import Source

LOOPBACK = "127.0.0.1"
_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_RELOAD_SECONDS = 2.0
_CACHE_BYTES = 96 * 2**20
_POLICY = "default-src 'self'; img-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; object-src 'none'"
_PAGE = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    '<title>GradFlow</title><link rel="icon" href="data:,"></head>'
    '<body><script type="module" src="boot.js"></script></body></html>'
)
_BOOT = 'import { render } from "./static/index.js";\nrender();\n'


class LocalLog:
    """A log directory that is read again when asked for its runs.

    Args:
        logdir: A folder of runs, or a run's folder.
        progress: Called with how many bytes of how many are read.
    """

    def __init__(self, logdir: Path, progress: Progress | None = None) -> None:
        self._lock = threading.Lock()
        self._read = float("-inf")
        self.provider = EventLog(logdir, progress)

    def reload(self) -> None:
        """Read what is new, unless that was done a moment ago."""
        with self._lock:
            if time.monotonic() - self._read < _RELOAD_SECONDS:
                return
            self.provider.reload()
            self._read = time.monotonic()


def open_source(logdir: Path, progress: Progress | None = None) -> Source:
    """Return what a log directory holds now.

    Args:
        logdir: A folder of runs, or a run's folder.
        progress: Called with how many bytes of how many are read.
    """
    log = LocalLog(logdir, progress)
    log.reload()
    return Source(
        WithDrafts(log.provider, str(logdir)), TensorCache(_CACHE_BYTES), tensorboard_context.RequestContext()
    )


class ViewerApp:
    """The WSGI application: the page, its code, and the plugin's routes.

    Args:
        logdir: A folder of runs, or a run's folder.
        progress: Called with how many bytes of how many are read.
    """

    def __init__(self, logdir: Path, progress: Progress | None = None) -> None:
        self._log = LocalLog(logdir, progress)
        self._log.reload()
        context = base_plugin.TBContext(data_provider=self._log.provider, logdir=str(logdir))
        self._routes = GradflowPlugin(context).get_plugin_apps()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Answer one request; refuse one for another host name, so that no foreign page reads through a browser."""
        request = wrappers.Request(environ)
        path = request.path
        if request.host.rpartition(":")[0] not in _NAMES and request.host not in _NAMES:
            answer = _text(f"Expected the host localhost or {LOOPBACK}; got another name.", "text/plain", 403)
        elif path in self._routes:
            if path in {"/runs", "/overview"}:
                self._log.reload()
            return self._routes[path](environ, start_response)
        elif path == "/":
            answer = _text(_PAGE, "text/html", 200)
        elif path == "/boot.js":
            answer = _text(_BOOT, "text/javascript", 200)
        else:
            answer = _text("There is no such page.", "text/plain", 404)
        return answer(environ, start_response)  # type: ignore[no-any-return]


class _Quiet(serving.WSGIRequestHandler):  # type: ignore[misc]
    """Says nothing about requests that went well."""

    def log_request(self, *_: Any) -> None:
        """Leave a request out of the output."""


def make_server(logdir: Path, port: int, progress: Progress | None = None) -> Any:
    """Return a server that is bound to this machine's loopback address and not running yet.

    Args:
        logdir: A folder of runs, or a run's folder.
        port: TCP port; 0 for any free one.
        progress: Called with how many bytes of how many are read before it is ready.

    Raises:
        OSError: The port is taken.
    """
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((LOOPBACK, port))
        bound.listen()
        number = bound.getsockname()[1]
        return serving.make_server(
            LOOPBACK, number, ViewerApp(logdir, progress), threaded=True, request_handler=_Quiet, fd=bound.fileno()
        )


def _text(text: str, kind: str, status: int) -> wrappers.Response:
    headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
    return wrappers.Response(text, status, headers, content_type=f"{kind}; charset=utf-8")
