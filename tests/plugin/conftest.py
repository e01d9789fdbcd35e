"""Fixtures of the panel's server: known logs, a source over TensorBoard's own reader, an HTTP client, a decoder."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tensorboard import context as tensorboard_context
from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
from tensorboard.plugins import base_plugin
from werkzeug.test import Client

from tensorboard_plugin_gradflow.cache import TensorCache
from tensorboard_plugin_gradflow.plugin import GradflowPlugin
from tensorboard_plugin_gradflow.source import Source


@pytest.fixture(scope="session")
def logs():
    """The module that writes known runs."""
    spec = importlib.util.spec_from_file_location("gradflow_test_logs", Path(__file__).with_name("logs.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class ReadAnew(data_provider.MultiplexerDataProvider):
    """TensorBoard's Python data provider over a log directory, with its default sampling; counts how often it lists.

    It reads what is new in the log before each list, as the fast one does in the background.
    """

    def __init__(self, logdir):
        self.listed = 0
        self._logdir = str(logdir)
        self._reader = plugin_event_multiplexer.EventMultiplexer()
        super().__init__(self._reader, self._logdir)

    def list_tensors(self, *args, **more):
        self.listed += 1
        self._reader.AddRunsFromDirectory(self._logdir)
        self._reader.Reload()
        return super().list_tensors(*args, **more)


def provider_of(logdir):
    """Return TensorBoard's Python data provider over a log directory, with its default sampling."""
    multiplexer = plugin_event_multiplexer.EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(logdir))
    multiplexer.Reload()
    return data_provider.MultiplexerDataProvider(multiplexer, str(logdir))


@pytest.fixture
def open_source():
    """Return a function from log directory to source."""
    return lambda logdir: Source(provider_of(logdir), TensorCache(2**20), tensorboard_context.RequestContext())


@pytest.fixture
def read_anew():
    """The provider that reads what is new and counts, from a log directory."""
    return ReadAnew


@pytest.fixture
def open_client():
    """Return a function from log directory to an HTTP client of the plugin's routes."""

    def open_client(logdir, provider=None):
        context = base_plugin.TBContext(data_provider=provider or provider_of(logdir), logdir=str(logdir))
        apps = GradflowPlugin(context).get_plugin_apps()
        return Client(lambda environ, start: apps[environ["PATH_INFO"]](environ, start))

    return open_client


@pytest.fixture(scope="session")
def decode():
    """Return a reader of the binary form, written from http_api.md alone."""

    def decode(body):
        assert body[:4] == b"GFS1"
        length = int.from_bytes(body[4:8], "little")
        header = json.loads(body[8 : 8 + length])
        offset, columns, sites = 8 + length, header["columns"], len(header["sites"])
        assert offset % 8 == 0
        facts = np.frombuffer(body, "<f8", 4 * columns, offset).reshape(4, columns)
        cells = np.frombuffer(body, "<f4", offset=offset + facts.nbytes)
        blocks = cells.reshape(len(header["reducers"]), sites, columns)
        return SimpleNamespace(
            **header,
            first=facts[0].astype(int).tolist(),
            last=facts[1].astype(int).tolist(),
            wall=facts[2],
            readings=facts[3].astype(int).tolist(),
            values=dict(zip(header["reducers"], blocks, strict=True)),
        )

    return decode
