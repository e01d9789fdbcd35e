"""Alerts in a W&B run: handed over where the server answers, so that none keeps the run's end waiting."""

from __future__ import annotations

import contextlib
import http.client
import logging
import ssl
import time
import urllib.error
import urllib.request
from collections import deque
from functools import partial
from typing import Any, final

from gradflow_export.records.step_record import StepRecord
from gradflow_export.writers.wandb import runs as wandb_runs
from gradflow_export.writers.wandb.incidents import Alert, Incidents
from gradflow_export.writers.wandb.lane import Lane
from gradflow_export.writers.wandb.module import Module
from gradflow_export.writers.wandb.rows import Rows

_log = logging.getLogger("gradflow_export")

PROBE_SECONDS, RETRY_SECONDS = 15.0, 10.0
TOLD = "told"
"""Key of the run's summary that holds what was reported, so that a resumed run does not report it again."""

_DOWN = 500


@final
class Alerts:
    """Sends alerts to the run that is active.

    wandb sends alerts one after the other before it ends a run, and ``finish_timeout`` does not hold while one waits
    for the server. Where a run has that limit, an alert is therefore handed over only when the server answers; the
    question is asked on a thread of its own. Where a run has none, its end waits for the server in any case.

    Args:
        module: wandb, or a module like it.
        cooldown: As for :class:`Incidents`.
        most: As for :class:`Incidents`.
        healed: As for :class:`Incidents`.
    """

    def __init__(self, module: Module, cooldown: float, most: int, *, healed: bool = False) -> None:
        self._module, self._incidents = module, Incidents(cooldown, most, healed=healed)
        self._waiting: deque[Alert] = deque(maxlen=max(most, 1))
        self._lane, self._again, self._limited = Lane(), 0.0, False

    def begin(self, rows: Rows) -> None:
        """Learn from the run's summary what an earlier session of it reported."""
        if getattr(rows.run, "resumed", False):
            told = rows.summary(TOLD)
            self._incidents.remember([str(cause) for cause in told] if isinstance(told, (list, tuple)) else ())

    def add(self, record: StepRecord) -> None:
        """Take in what a record says of issues."""
        self._waiting.extend(self._incidents.add(record.issues, record.wall_time))

    def send(self, rows: Rows) -> None:
        """Send what waits, unless the server did not answer a moment ago."""
        limited = not getattr(rows.run, "offline", True) and wandb_runs.finish_limit(rows.run)
        if self._waiting and not limited:
            self._hand_over(rows)
        elif self._waiting and time.monotonic() >= self._again:
            self._lane.put(partial(self._try, rows))

    def finish(self, rows: Rows, deadline: float) -> None:
        """Send what waits now or never.

        Args:
            rows: Of the run that ends.
            deadline: Of the monotonic clock. A server that is still thinking about the question whether it is there is
                given as long as the user gives the run itself.
        """
        self._waiting.extend(self._incidents.rest())
        self._again = 0.0
        self.send(rows)
        self._lane.wait(max(0.0, deadline - time.monotonic()))
        left = len(self._waiting)
        if left and not rows.ended:
            _log.warning(
                "gradflow: the W&B server does not answer; %d alert%s not sent, the issues are in the table %s/issues",
                left,
                " is" if left == 1 else "s are",
                rows.prefix,
            )
        self._waiting.clear()

    def _try(self, rows: Rows) -> None:
        if answers(rows.run):
            self._hand_over(rows)
        else:
            self._again = time.monotonic() + RETRY_SECONDS

    def _hand_over(self, rows: Rows) -> None:
        handed = False
        with contextlib.suppress(IndexError):  # the run's end may have taken the last meanwhile
            while True:
                alert = self._waiting.popleft()
                if rows.try_to("an alert", partial(self._module.alert, rows.run, alert)):
                    handed = True
                    _log.info("gradflow: alert handed to W&B: %s", alert.title)
        if handed:
            rows.summarise({TOLD: self._incidents.known})
            if self._incidents.spent and not self._limited:
                self._limited = True
                _log.warning("gradflow: %d alerts were sent; no more in this run", self._incidents.sent)


def answers(run: Any) -> bool:
    """Return whether a run's server answers at all; where that is unknown, it is left to wandb.

    Args:
        run: A run.
    """
    settings = run.settings
    proxies = {kind: getattr(settings, f"{kind}_proxy", None) for kind in ("http", "https")}
    given = {kind: address for kind, address in proxies.items() if address}
    ask = urllib.request.build_opener(*([urllib.request.ProxyHandler(given)] if given else []))
    try:
        with ask.open(f"{str(settings.base_url).rstrip('/')}/healthz", timeout=PROBE_SECONDS):
            return True
    except urllib.error.HTTPError as error:
        return error.code < _DOWN
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # wandb may know a certificate that Python does not
    except (OSError, http.client.HTTPException):
        return False
    except Exception:
        return True
