"""Which samples a checkpoint finds in a channel."""

from __future__ import annotations

from rlinf_async.runtime.jobs.language.checkpoints import _items
from tests.channels.wire.direct_kit import item, items, world


async def test_a_sample_whose_arrays_are_still_with_its_producer_is_left_to_the_ledger() -> None:
    channel = items()
    async with world() as one:
        near, far = await one.plain("near"), await one.producer("far")
        for number, party in enumerate((near, far, near)):
            sender = party.sender(channel)
            await sender.put(item(number))
            await sender.flush()
        assert [each.check() for each in _items(channel)] == [0, 2]
        assert channel.statistics().depth == 3
