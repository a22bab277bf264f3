"""Two kinds of workers, one channel between them, a process for each: no torch, no configuration.

    python examples/custom_worker.py

Prime numbers are found by two workers that share one channel of candidates, so the faster one
simply takes more; a third worker adds up what they find.
"""

import msgspec

import rlinf_async as ra


class Candidate(msgspec.Struct):
    number: int


class Prime(msgspec.Struct):
    number: int
    found_by: int


def is_prime(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, int(number**0.5) + 1))


class Sieve(ra.Worker):
    """Blocking work runs in the worker's compute thread, so the worker goes on answering."""

    async def run(self, candidates: ra.Receiver[Candidate], primes: ra.Sender[Prime]) -> int:
        tested = 0
        async for candidate in candidates:
            if await self.compute(is_prime, candidate.number):
                await primes.put(Prime(candidate.number, found_by=self.rank))
            tested += 1
        return tested


class Adder(ra.Worker):
    async def run(self, primes: ra.Receiver[Prime]) -> dict[int, int]:
        found: dict[int, int] = {}
        async for prime in primes:
            found[prime.found_by] = found.get(prime.found_by, 0) + 1
        return found


async def main() -> None:
    async with ra.Cluster.process() as cluster:  # or .local(), for plain breakpoints
        candidates = cluster.channel(Candidate, name="candidates", capacity=32)
        primes = cluster.channel(Prime, name="primes", capacity=32)
        sieves = await cluster.launch(Sieve, count=2)
        adders = await cluster.launch(Adder)

        tested = sieves.call(Sieve.run, candidates.receiver, primes.sender)
        found = adders[0].call(Adder.run, primes.receiver)
        with candidates.sender as sender:
            for number in range(2, 2_000):
                await sender.put(Candidate(number))

        print("tested by rank:", await tested)
        print("primes by rank:", dict(sorted((await found).items())))


if __name__ == "__main__":
    ra.run(main())
