"""Typed async channels."""

if __name__ != "rlinf_async.channels":
    raise ImportError(f"import this package as 'rlinf_async.channels', not as {__name__!r}")
