"""The debuggers over HTTP: summaries for anyone on this machine, levels and clearing for those who hold the token.

    pip install 'gradflow-export[api]'

It reads counters under a lock and never a tensor, so that it may run in a thread beside the training.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from gradflow_export.debugging.inspect.debugger import PyTorchDebugger
from gradflow_export.debugging.inspect.diffusion import DiffusionModelDebugger
from gradflow_export.debugging.inspect.levels import DebugLevel
from gradflow_export.debugging.inspect.training import TrainingDebugger, training_summary
from gradflow_export.debugging.service.hosts import HostGate, is_everywhere, is_loopback
from gradflow_export.errors import ArgumentError, ArgumentTypeError, MissingPackageError, StorageError

try:
    import uvicorn
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.exposition import CONTENT_TYPE_LATEST
    from prometheus_client.registry import Collector
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ImportError as error:
    raise MissingPackageError(
        f"the debugging API needs starlette, uvicorn and prometheus-client, got {error}; install them: pip install "
        "'gradflow-export[api]'"
    ) from error

_log = logging.getLogger("gradflow_export")

HOST, PORT = "127.0.0.1", 8008
TOKEN_VARIABLE = "GRADFLOW_API_TOKEN"  # noqa: S105 - the name of a variable, not a token
LEAST_TOKEN = 16
START_SECONDS = 10.0
_PREFIX = "/training-logs/debug"


def create_app(
    training_debugger: TrainingDebugger | None = None,
    diffusion_debugger: DiffusionModelDebugger | None = None,
    general_debugger: PyTorchDebugger | None = None,
    *,
    token: str | None = None,
    hosts: Sequence[str] = (),
) -> Starlette:
    """Return an application that reports on three debuggers.

    ``GET /training-logs/debug/summary``, ``GET /training-logs/debug/training/summary``, ``GET /health`` and
    ``GET /metrics`` (for Prometheus) answer anyone. ``POST /training-logs/debug/level/{basic,advanced,extreme}`` and
    ``POST /training-logs/debug/clear`` need the header ``Authorization: Bearer <token>``.

    A request is answered only when its header ``Host`` names a loopback address, ``localhost``, the address that it
    reached, or one of ``hosts``, so that no web page can reach the API through a name of its own (DNS rebinding); 403
    otherwise, and for requests that a browser sends on behalf of another site.

    Args:
        training_debugger: Whose steps are reported; a new one where it is left out, as for the others.
        diffusion_debugger: Whose latents are reported.
        general_debugger: What else is reported, such as ``AsyncTrainingLogger(...).debugger``.
        token: At least 16 characters. Otherwise that of the environment variable ``GRADFLOW_API_TOKEN``; without one, a
            token is made and written to the console, once.
        hosts: Further names or addresses, without port, under which the API is reached.

    Raises:
        ArgumentError: The token is too short, or a host is no name.
        ArgumentTypeError: An argument has the wrong type.
    """
    kinds: tuple[tuple[str, PyTorchDebugger | None, type[PyTorchDebugger]], ...] = (
        ("training_debugger", training_debugger, TrainingDebugger),
        ("diffusion_debugger", diffusion_debugger, DiffusionModelDebugger),
        ("general_debugger", general_debugger, PyTorchDebugger),
    )
    debuggers = {}
    for name, given, kind in kinds:
        if given is not None and not isinstance(given, kind):
            raise ArgumentTypeError(f"{name} must be a {kind.__name__}, got {type(given).__name__}; or leave it out.")
        debuggers[name] = kind() if given is None else given
    service = _Service(debuggers, _token(token))
    routes = [
        Route(f"{_PREFIX}/summary", service.summary),
        Route(f"{_PREFIX}/training/summary", service.training),
        Route(f"{_PREFIX}/level/{{level}}", service.set_level, methods=["POST"]),
        Route(f"{_PREFIX}/clear", service.clear, methods=["POST"]),
        Route("/health", service.health),
        Route("/metrics", service.metrics),
    ]
    gate = HostGate(hosts)
    app = Starlette(routes=routes, exception_handlers={HTTPException: _refused}, middleware=[Middleware(gate.around)])
    app.state.gate = gate
    return app


def serve(app: Starlette, host: str = HOST, port: int = PORT) -> None:
    """Serve until interrupted.

    Args:
        app: As :func:`create_app` returns it.
        host: Where to listen. With anything but a loopback address everyone who reaches it can read the summaries. A
            name or address given here is one under which the API may be reached.
        port: 0 for a free one.

    Raises:
        ArgumentError: Host or port cannot be used.
    """
    _server(app, host, port).run()


@contextlib.contextmanager
def serving(app: Starlette, host: str = HOST, port: int = PORT) -> Iterator[str]:
    """Serve in a thread of its own while the block lasts, as beside a training loop.

    Args:
        app: As :func:`create_app` returns it.
        host: As for :func:`serve`.
        port: As there.

    Yields:
        The address, such as ``"http://127.0.0.1:8008"``.

    Raises:
        ArgumentError: Host or port cannot be used.
        StorageError: The port is taken.
    """
    server = _server(app, host, port)
    thread = threading.Thread(target=_run_quietly, args=(server,), name="gradflow-api", daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + START_SECONDS
        while not server.started and thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        if not server.started:
            raise StorageError(f"expected a free port, got {host}:{port}, where nothing can listen; choose port=0.")
        bound = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://{f'[{host}]' if ':' in host else host}:{bound}"
    finally:
        server.should_exit = True
        thread.join(START_SECONDS)


class _Service:
    """The endpoints."""

    def __init__(self, debuggers: dict[str, PyTorchDebugger], token: str) -> None:
        self._debuggers, self._token = debuggers, token.encode()
        self._registry = CollectorRegistry()
        self._registry.register(_Counters(debuggers))

    async def summary(self, _: Request) -> Response:
        """Answer with the three summaries."""
        return JSONResponse({name: debugger.get_debug_summary() for name, debugger in self._debuggers.items()})

    async def training(self, _: Request) -> Response:
        """Answer with the summary of the training steps."""
        return JSONResponse(training_summary(self._debuggers["training_debugger"].history.counts()))

    async def set_level(self, request: Request) -> Response:
        """Set the level of all debuggers."""
        self._check(request)
        word = request.path_params["level"]
        try:
            level = DebugLevel(word.lower())
        except ValueError:
            words = ", ".join(each.value for each in DebugLevel)
            raise HTTPException(422, f"expected one of {words}; got {word[:40]!r}; choose one of them.") from None
        for debugger in self._debuggers.values():
            debugger.level = level
        return JSONResponse({"level": level.value})

    async def clear(self, request: Request) -> Response:
        """Have all debuggers forget and begin to count anew."""
        self._check(request)
        for debugger in self._debuggers.values():
            debugger.clear_debug_history()
        return JSONResponse({"cleared": list(self._debuggers)})

    async def health(self, _: Request) -> Response:
        """Answer that this process answers."""
        return JSONResponse({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        """Answer in the form that Prometheus reads."""
        return Response(generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})

    def _check(self, request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token):
            what = "another token" if given else "none"
            message = f"expected the header 'Authorization: Bearer <token>', got {what}; the console or "
            message += f"{TOKEN_VARIABLE} of the process that serves holds it."
            raise HTTPException(401, message, headers={"WWW-Authenticate": "Bearer"})


class _Counters(Collector):
    """What Prometheus reads, all of one moment for each debugger."""

    def __init__(self, debuggers: dict[str, PyTorchDebugger]) -> None:
        self._debuggers = debuggers

    def collect(self) -> Iterable[Metric]:
        """Return the metrics as they are now."""
        found = CounterMetricFamily(
            "gradflow_debug_anomalies", "Looks at which something was wrong", labels=["debugger"]
        )
        kept = GaugeMetricFamily("gradflow_debug_history_length", "Entries that are remembered", labels=["debugger"])
        levels = GaugeMetricFamily("gradflow_debug_level", "1 at the level that is set", labels=["debugger", "level"])
        counts = {name: debugger.history.counts() for name, debugger in self._debuggers.items()}
        for name, debugger in self._debuggers.items():
            found.add_metric([name], counts[name]["anomalies"])
            kept.add_metric([name], counts[name]["entries"])
            for level in DebugLevel:
                levels.add_metric([name, level.value], float(debugger.level is level))
        training = counts["training_debugger"]
        told = (
            ("steps", "Steps that were looked at"),
            ("anomaly_steps", "Steps at which something was wrong"),
            ("gradient_explosions", "Steps with a gradient above the threshold"),
            ("gradient_vanishing", "Steps with a gradient below the threshold"),
            ("loss_anomalies", "Steps whose loss is NaN or Inf"),
        )
        steps = [CounterMetricFamily(f"gradflow_training_{name}", text, training[name]) for name, text in told]
        return [found, kept, levels, *steps]


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)


def _token(given: str | None) -> str:
    if given is not None and not isinstance(given, str):
        raise ArgumentTypeError(f"token must be a string, got {type(given).__name__}; or leave it out.")
    token = os.environ.get(TOKEN_VARIABLE) if given is None else given
    if token is None:
        token = secrets.token_urlsafe(24)
        # To the console alone: handlers of the logging module may keep it for ever.
        sys.stderr.write(f"gradflow: changes over the API need the header 'Authorization: Bearer {token}'\n")
    if len(token) < LEAST_TOKEN or not token.isascii() or any(c.isspace() for c in token):
        raise ArgumentError(
            f"token must be at least {LEAST_TOKEN} ASCII characters without spaces, got {len(token)}; leave it out for "
            "a random one."
        )
    return token


def _server(app: Starlette, host: str, port: int) -> uvicorn.Server:
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise ArgumentError(f"port must be a number from 0 to 65535, got {port!r}; 0 takes a free one.")
    if not isinstance(host, str) or not host:
        raise ArgumentError(f"host must be an address, got {host!r}; for example '127.0.0.1'.")
    gate = getattr(app.state, "gate", None)
    if isinstance(gate, HostGate) and not is_everywhere(host):
        gate.allow(host)
    if not is_loopback(host):
        _log.warning("gradflow: everyone who reaches %s:%d can read the summaries of the debuggers", host, port)
    quiet: dict[str, Any] = {"log_level": "warning", "access_log": False, "lifespan": "off", "ws": "none"}
    return uvicorn.Server(uvicorn.Config(app, host=host, port=port, **quiet))


def _run_quietly(server: uvicorn.Server) -> None:
    run: Callable[[], None] = server.run
    with contextlib.suppress(SystemExit):  # uvicorn leaves so where the port is taken
        run()
