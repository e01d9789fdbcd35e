"""What a request may ask for, and who may ask: the same for every route."""

from __future__ import annotations

from types import MappingProxyType

from werkzeug import wrappers

from tensorboard_plugin_gradflow.errors import RequestError

MOST_ANSWER = 64 * 2**20
"""Bytes of an answer before compression."""

_SEVERAL = MappingProxyType(
    {
        ("/series", "site"): 4096,
        ("/around", "site"): 4096,
        ("/moment", "metric"): 16,
        ("/overview", "run"): 100,
    }
)


def check_request(request: wrappers.Request) -> None:
    """Raise unless a request reads, comes from where it may, and names nothing more often than it may.

    A page of another site can have a browser ask, though not read, and each answer costs time. What the panel asks is
    same-origin wherever TensorBoard is shown: in a tab, behind a proxy, or in the frame of a notebook. A person who
    follows a link from elsewhere comes from another site too, and may.

    Args:
        request: The request.

    Raises:
        RequestError: It is refused.
    """
    if request.method not in {"GET", "HEAD"}:
        raise RequestError(405, f"Expected a GET request; got {request.method}.")
    headers = request.headers
    if headers.get("Sec-Fetch-Site") == "cross-site":
        followed = headers.get("Sec-Fetch-Mode") == "navigate" and headers.get("Sec-Fetch-Dest") == "document"
        if not followed:
            raise RequestError(403, "Expected a request of this page; got one that a page of another site makes.")
    for name in request.args:
        most, got = _SEVERAL.get((f"/{request.path.rpartition('/')[2]}", name), 1), len(request.args.getlist(name))
        if got > most:
            raise RequestError(400, f"Expected the argument {name[:40]!r} at most {most} times; got it {got} times.")


def check_size(size: int) -> None:
    """Raise when an answer is too large to be sent.

    Args:
        size: In bytes.

    Raises:
        RequestError: It is.
    """
    if size > MOST_ANSWER:
        raise RequestError(
            413,
            f"Expected an answer of at most {MOST_ANSWER // 2**20} MB; it would have {size / 2**20:.0f} MB. Ask for "
            "fewer columns, rows, sites or reductions, or for a shorter range.",
        )
