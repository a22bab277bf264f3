"""Strategies that Megatron has, but this backend does not offer: refused by name. No torch."""

from __future__ import annotations

import msgspec

from rlinf_async.backends.megatron.architecture import Architecture, layout_of
from rlinf_async.parallel import Strategy, StrategyError


def check_offered(architecture: Architecture, parts: Strategy, *, cp: int, ep: int) -> None:
    """Refuse context and expert parallelism.

    Args:
        architecture: of the model.
        parts: how each copy of the model is cut otherwise.
        cp: ranks that share the tokens of each sample.
        ep: ranks that share the experts of each layer.

    Raises:
        StrategyError: with the reason, and strategies for as many ranks that fit the model.
    """
    faults = []
    if cp > 1:
        faults.append(
            f"cp={cp}: context parallelism needs the attention of Transformer Engine, on GPUs, in "
            f"place of this backend's own; {_instead(architecture, parts, cp)}"
        )
    if ep > 1:
        faults.append(
            f"ep={ep}: expert parallelism spreads experts, and this backend trains dense models, "
            f"which have none; {_instead(architecture, parts, ep)}"
        )
    if faults:
        raise StrategyError(faults)


def _instead(architecture: Architecture, parts: Strategy, ranks: int) -> str:
    """What the ranks may do instead."""
    replace = msgspec.structs.replace
    wanted = {
        f"tp={parts.tp * ranks}, pp={parts.pp}": replace(parts, tp=parts.tp * ranks),
        f"tp={parts.tp}, pp={parts.pp * ranks}": replace(parts, pp=parts.pp * ranks),
    }
    fitting = [name for name, strategy in wanted.items() if _fits(architecture, strategy)]
    fitting.append(f"tp={parts.tp}, pp={parts.pp} with {ranks} x the data ranks")
    return f"nearest that fit the model: {'; '.join(fitting)}"


def _fits(architecture: Architecture, strategy: Strategy) -> bool:
    try:
        layout_of(architecture, strategy)
    except StrategyError:
        return False
    return True
