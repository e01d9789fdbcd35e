"""The routes of the GradFlow tab; each checks its arguments and calls one plain function."""

from __future__ import annotations

import gzip
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tensorboard import errors as tensorboard_errors
from tensorboard import plugin_util
from tensorboard.backend import http_util, json_util
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from tensorboard_plugin_gradflow import data
from tensorboard_plugin_gradflow.cache import Damage, IndexCache, Remembered, TensorCache
from tensorboard_plugin_gradflow.drafts import WithDrafts
from tensorboard_plugin_gradflow.errors import RequestError
from tensorboard_plugin_gradflow.gate import check_request, check_size
from tensorboard_plugin_gradflow.histograms import list_histograms, read_all_histograms, read_histograms
from tensorboard_plugin_gradflow.metadata import PLUGIN_NAME, TAB_NAME
from tensorboard_plugin_gradflow.moment import read_moment
from tensorboard_plugin_gradflow.overview import overview
from tensorboard_plugin_gradflow.rows import Rows, numbers_of
from tensorboard_plugin_gradflow.series import DEFAULT_AROUND, DEFAULT_COLUMNS, MOST_AROUND, Query, read_series
from tensorboard_plugin_gradflow.sound import guarded
from tensorboard_plugin_gradflow.source import Source
from tensorboard_plugin_gradflow.story import architecture, time_axis
from tensorboard_plugin_gradflow.totals import summary, training_summary
from tensorboard_plugin_gradflow.tree import site_tree

_CACHE_BYTES = 96 * 2**20
_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,15}")
_SAMPLE, _WORTH = 2**15, 0.75
_SLICE = 2**20
_BINARY = "application/octet-stream"

Handler = Callable[[wrappers.Request, Source], "dict[str, Any] | bytearray"]
WsgiApp = Callable[[dict[str, Any], Any], Iterable[bytes]]


class GradflowPlugin(base_plugin.TBPlugin):  # type: ignore[misc]
    """Serves the panel and its data.

    Args:
        context: What TensorBoard gives to every plugin.
    """

    plugin_name = PLUGIN_NAME

    def __init__(self, context: base_plugin.TBContext) -> None:
        self._provider = WithDrafts(guarded(context.data_provider), context.logdir)
        self._cache, self._kept, self._damage = TensorCache(_CACHE_BYTES), IndexCache(), Damage()
        self._outcomes = Remembered()
        self._logdir = Path(context.logdir) if context.logdir and Path(context.logdir).is_dir() else None
        self._log = logging.getLogger("tensorboard.gradflow")

    def get_plugin_apps(self) -> dict[str, WsgiApp]:
        """Return the routes, relative to the plugin's own path."""
        return {
            "/runs": self._app(lambda _, source: data.list_runs(source)),
            "/meta": self._app(lambda request, source: data.run_meta(source, _text(request, "run"))),
            "/issues": self._app(
                lambda request, source: data.run_issues(source, _text(request, "run"), _number(request, "most"))
            ),
            "/series": self._app(_series),
            "/around": self._app(_around),
            "/overview": self._app(self._overview),
            "/architecture": self._app(lambda request, source: architecture(source, _text(request, "run"))),
            "/annotations": self._app(lambda request, source: time_axis(source, _text(request, "run"))),
            "/tree": self._app(
                lambda request, source: site_tree(source, _text(request, "run"), _text(request, "metric"))
            ),
            "/moment": self._app(_moment),
            "/histograms": self._app(_histograms),
            "/summary": self._app(lambda request, source: summary(source, request.args.get("run"))),
            "/training/summary": self._app(lambda request, source: training_summary(source, request.args.get("run"))),
            "/catalog": self._app(lambda *_: data.catalog()),
            "/static/index.js": _bundle,
        }

    def is_active(self) -> bool:
        """Return False: TensorBoard itself activates the tab once a run holds data of this plugin."""
        return False

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """Return where the panel's code is and what the tab is called."""
        return base_plugin.FrontendMetadata(es_module_path="/static/index.js", tab_name=TAB_NAME)

    def _app(self, handler: Handler) -> WsgiApp:
        def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            request = wrappers.Request(environ)
            return self._respond(request, handler)(environ, start_response)  # type: ignore[no-any-return]

        return app

    def _overview(self, request: wrappers.Request, source: Source) -> dict[str, Any]:
        patience = _number(request, "patience")
        seconds = None if patience is None else max(0, patience) / 1000
        return overview(source, self._outcomes, self._logdir, request.args.getlist("run"), seconds)

    def _respond(self, request: wrappers.Request, handler: Handler) -> wrappers.Response:
        """Answer, or say in JSON why not; an exception never reaches the browser."""
        try:
            check_request(request)
            context = plugin_util.context(request.environ)
            experiment = plugin_util.experiment_id(request.environ)
            source = Source(self._provider, self._cache, context, experiment, self._kept, self._damage)
            answer = handler(request, source)
            return _json(request, answer, 200) if isinstance(answer, dict) else _bytes(request, answer)
        except RequestError as error:
            return _json(request, {"error": error.message}, error.status)
        except tensorboard_errors.PublicError as error:
            return _json(request, {"error": str(error)}, error.http_code)
        except Exception:
            self._log.exception("GradFlow could not answer %s", request.path)
            return _json(request, {"error": "The GradFlow plugin failed; TensorBoard's log says why."}, 500)


def _series(request: wrappers.Request, source: Source) -> bytearray:
    columns = _number(request, "columns")
    start, before = _number(request, "from"), _number(request, "before")
    query = Query(
        metric=_text(request, "metric"),
        first=_number(request, "first"),
        last=_number(request, "last"),
        columns=DEFAULT_COLUMNS if columns is None else columns,
        reducers=tuple(request.args.get("reduce", "extreme").split(",")),
        sites=tuple(request.args.getlist("site")),
        phase=request.args.get("phase", ""),
        rows=Rows(
            _number(request, "rows"),
            numbers_of(request.args["cuts"]) if "cuts" in request.args else (),
            0 if start is None else start,
            _number(request, "until"),
        ),
        before=before or 0,
    )
    return read_series(source, _text(request, "run"), query)


def _around(request: wrappers.Request, source: Source) -> bytearray:
    step, count = _number(request, "step"), _number(request, "count")
    if step is None:
        raise RequestError(400, "Expected the argument 'step' in the query; it is absent.")
    count = DEFAULT_AROUND if count is None else count
    if not 1 <= count <= MOST_AROUND:
        raise RequestError(400, f"Expected count between 1 and {MOST_AROUND}; got {count}.")
    query = Query(
        metric=_text(request, "metric"),
        sites=tuple(request.args.getlist("site")),
        phase=request.args.get("phase", ""),
        around=(step, count),
    )
    return read_series(source, _text(request, "run"), query)


def _moment(request: wrappers.Request, source: Source) -> dict[str, Any]:
    step = _number(request, "step")
    metrics = tuple(dict.fromkeys(request.args.getlist("metric")))
    return read_moment(source, _text(request, "run"), step, metrics, request.args.get("phase", ""))


def _histograms(request: wrappers.Request, source: Source) -> dict[str, Any]:
    run = _text(request, "run")
    if "metric" not in request.args and "site" not in request.args:
        return list_histograms(source, run)
    first, last, most = (_number(request, name) for name in ("first", "last", "most"))
    if "site" not in request.args:
        return read_all_histograms(source, run, _text(request, "metric"), first, last, most)
    return read_histograms(source, run, _text(request, "metric"), _text(request, "site"), first, last, most)


def _text(request: wrappers.Request, name: str) -> str:
    value = request.args.get(name)
    if value is None:
        raise RequestError(400, f"Expected the argument {name!r} in the query; it is absent.")
    return str(value)


def _number(request: wrappers.Request, name: str) -> int | None:
    value = request.args.get(name)
    if value is None:
        return None
    if not _WHOLE_NUMBER.fullmatch(value):
        raise RequestError(400, f"Expected a whole number for {name!r}; got {value[:40]!r}.")
    return int(value)


def _json(request: wrappers.Request, content: dict[str, Any], status: int) -> wrappers.Response:
    # TensorBoard would do the same, and nobody would see how much it is before it is sent.
    try:
        text = json.dumps(content, allow_nan=False).encode()
    except ValueError:  # a number that JSON does not have: rare, so looked for only now
        text = json.dumps(json_util.Cleanse(content)).encode()
    if status == 200:
        check_size(len(text))
    return http_util.Respond(request, text, "application/json", status)


def _bytes(request: wrappers.Request, content: bytearray) -> wrappers.Response:
    check_size(len(content))
    # TensorBoard compresses text by itself, and binary data never.
    if "gzip" not in request.headers.get("Accept-Encoding", "") or not _shrinks(content):
        response = http_util.Respond(request, b"", _BINARY)
        # In slices: a copy of the whole would take as much memory again.
        response.response = _slices(content)
        response.headers["Content-Length"] = str(len(content))
        return response
    packed = gzip.compress(content, compresslevel=1, mtime=0)
    return http_util.Respond(request, packed, _BINARY, content_encoding="gzip")


def _slices(content: bytearray) -> Iterator[bytes]:
    for start in range(0, len(content), _SLICE):
        yield bytes(content[start : start + _SLICE])


def _shrinks(content: bytes | bytearray) -> bool:
    """Return whether compression is worth its time: the digits of most readings are noise, which does not shrink."""
    end = content[-_SAMPLE:]
    return len(gzip.compress(end, compresslevel=1)) < _WORTH * len(end)


def _bundle(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    path = Path(__file__).parent / "static" / "index.js"
    response = http_util.Respond(wrappers.Request(environ), path.read_bytes(), "text/javascript")
    return response(environ, start_response)  # type: ignore[no-any-return]
