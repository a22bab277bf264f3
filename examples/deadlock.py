"""Two workers that wait for each other, and the report that names them.

    python examples/deadlock.py

Each waits for the other's first message, so neither can continue. After ``deadlock_after`` seconds
the cluster raises `Deadlock` instead of hanging for ever.
"""

import sys

import rlinf_async as ra


class Polite(ra.Worker):
    """Answers a message; does not speak first."""

    async def converse(self, hear: ra.Receiver[str], say: ra.Sender[str]) -> None:
        heard = await hear.get()
        await say.put(f"you said {heard!r}")


class Shy(Polite):
    pass


async def main() -> None:
    async with ra.Cluster.process(deadlock_after=3.0) as cluster:
        to_polite = cluster.channel(str, name="to polite")
        to_shy = cluster.channel(str, name="to shy")
        polite = await cluster.launch(Polite)
        shy = await cluster.launch(Shy)
        first = polite.call(Polite.converse, to_polite.receiver, to_shy.sender)
        second = shy.call(Shy.converse, to_shy.receiver, to_polite.sender)
        await first
        await second


if __name__ == "__main__":
    try:
        ra.run(main())
    except ra.Deadlock as deadlock:
        sys.exit(f"Deadlock: {deadlock}")
