"""What must hold of every history, whichever way its program ran.

* Nothing is lost and nothing is doubled: each item whose put returned was consumed once, is a dead
  letter, or is accounted for: it was under way when the channel closed, failed, or lost its last
  receiver (``refused``), is still in a channel that failed, or died with a process that was killed.
* What a killed process had may be seen twice, as often as the owner says (``unconfirmed``).
* Batches weigh what was asked for, and items arrive under their own key.
* The items of a key come in order: see `order`.
* No key holds more than its capacity; all counts are zero at the end; everybody ends.
"""

from __future__ import annotations

from collections import Counter

from rlinf_async.channels import Key
from tests.channels.model.history import Event, History
from tests.channels.model.items import number_in
from tests.channels.model.order import gave_back, out_of_order
from tests.channels.model.program import SENDING
from tests.channels.model.stage import ZERO
from tests.channels.model.waiting import weights_put

EXPECTED = {
    "ok", "cancelled", "EndOfChannel", "ChannelClosed", "ChannelFailed", "NoReceivers",
    "ChannelEmpty", "ChannelFull",
}  # fmt: skip


def check(history: History) -> list[str]:
    """Everything that is wrong with this history."""
    found = [*history.violations]
    if history.hung:
        return [*found, history.hung]
    found += unexpected(history)
    found += lost_or_doubled(history)
    found += wrong_batches(history)
    found += not_replaced(history)
    found += out_of_order(history)
    found += out_of_bounds(history)
    found += not_over(history)
    return found


def unexpected(history: History) -> list[str]:
    """Operations that neither finished nor raised what they may raise."""
    found: list[str] = []
    failed = any(event.do == "fail" for event in history.events)
    for event in history.events:
        if event.died:
            continue
        if not event.finished:
            found.append(f"{described(event)} never finished")
        elif event.outcome not in EXPECTED and not (history.killed and _of_a_death(event)):
            found.append(f"{described(event)} raised {event.outcome}")
        elif event.outcome == "ChannelFailed" and not failed:
            found.append(f"{described(event)}: nobody has failed the channel")
    return found


def _of_a_death(event: Event) -> bool:
    return event.outcome in ("ConnectionLost", "LeaseLost")


class _Fates:
    """What became of each item."""

    def __init__(self, history: History) -> None:
        self.put: set[int] = set()
        self.tried: set[int] = set()
        self.consumed: Counter[int] = Counter()
        self.unknown: Counter[int] = Counter()
        self.dead = Counter(number_in(letter.item) for letter in history.dead)
        self.never_told = 0
        for event in history.events:
            if event.do in SENDING:
                self.tried.update(event.items)
                if event.outcome == "ok" and not event.died:
                    self.put.update(event.items)
            elif event.fate == "consumed" and event.outcome == "ok":
                self.consumed.update(event.kept)
            elif event.fate == "unknown":
                self.unknown.update(event.items)
            if event.died and event.do not in SENDING and not event.items:
                self.never_told += event.most


def lost_or_doubled(history: History) -> list[str]:
    """Items that were put and that nobody got, or that somebody got twice or out of nowhere."""
    fates, seen = _Fates(history), history.statistics
    assert seen is not None
    settled = fates.consumed + fates.dead
    doubled = [item for item, times in settled.items() if times > 1]
    again = sum(settled[item] - 1 for item in doubled)
    lost = sorted(fates.put - settled.keys() - fates.unknown.keys())
    excused = seen.refused + fates.never_told + getattr(seen, "lost", 0)
    if any(event.do == "fail" and event.outcome == "ok" for event in history.events):
        excused += seen.depth
    found: list[str] = []
    if again > (seen.unconfirmed if history.killed else 0):
        found.append(f"delivered twice: {named(doubled)}; unconfirmed={seen.unconfirmed}")
    if len(lost) > excused:
        found.append(f"lost: {named(lost)}; {excused} of them are accounted for")
    if strange := sorted(settled.keys() - fates.tried):
        found.append(f"never put, and delivered: {named(strange)}")
    return found


def wrong_batches(history: History) -> list[str]:
    """Batches that are too heavy or too light, and items of another key."""
    weights = weights_put(history)
    keys = {event.items[0]: event.key for event in history.events if event.do in SENDING}
    found: list[str] = []
    for event in history.events:
        if event.do in SENDING or not event.items:
            continue
        if any(keys.get(item) != event.key for item in event.items):
            found.append(f"{described(event)} was given items of other keys: {named(event.items)}")
        weight = sum(weights.get(item, 1) for item in event.items)
        if event.do not in ("batch", "lease"):
            continue
        if weight > event.most and len(event.items) > 1:
            found.append(f"{described(event)} weighs {weight}, more than {event.most}")
        if weight < event.least and not _may_have_ended(history, event, weights):
            found.append(f"{described(event)} weighs {weight}, less than {event.least}")
    return found


def not_replaced(history: History) -> list[str]:
    """Items that came once more as they were before a lease had replaced them."""
    handed = [event for event in history.events if event.do not in SENDING and event.replaced]
    found: list[str] = []
    for event in handed:
        if event.outcome != "ok" or event.fate != "consumed":
            continue
        before = dict(zip(event.items, event.replaced, strict=False))
        for later in handed:
            times = dict(zip(later.items, later.replaced, strict=False))
            found += [
                f"{described(later)} was given {named([item])} as it was before {described(event)}"
                for item in event.returned
                if later.begun > event.finished
                and times.get(item, before[item] + 1) <= before[item]
            ]
    return found


def _may_have_ended(history: History, event: Event, weights: dict[int, int]) -> bool:
    """A batch may be light if the channel had ended, or if the next item would not have fit."""
    last = max(
        (one.begun for one in history.events if one.do in SENDING and one.outcome == "ok"),
        default=0,
    )
    room = event.most - sum(weights.get(item, 1) for item in event.items)
    heavy = any(weights[one] > room for one in _of_key(history, event.key))
    return event.finished > last or heavy or bool(history.killed) or _closed(history)


def _closed(history: History) -> bool:
    return any(event.do in ("close", "fail") for event in history.events)


def _of_key(history: History, key: Key | None) -> list[int]:
    return [event.items[0] for event in history.events if event.do in SENDING and event.key == key]


def out_of_bounds(history: History) -> list[str]:
    """Depths that the channel reported, and may not have. What goes back may be over and above."""
    program = history.program
    returned = sum(
        max(len(event.items), event.most) for event in history.events if gave_back(event, history)
    )
    keys = {event.key for event in history.events if event.do in SENDING}
    room = program.capacity * len(keys)
    found = [
        f"{depth} items were queued, where {room} fit"
        for depth, _ in history.depths
        if depth > room + returned or depth < 0
    ]
    if program.max_weight is not None and not returned:
        heaviest = max(weights_put(history).values(), default=0)
        limit = max(program.max_weight, heaviest) * len(keys)
        found += [
            f"weight {weight} was queued, where {limit} fits"
            for _, weight in history.depths
            if weight > limit
        ]
    return found


def not_over(history: History) -> list[str]:
    """Counts that are not zero although all is over; a failed channel keeps what it had."""
    seen = history.statistics
    assert seen is not None
    failed = any(event.do == "fail" and event.outcome == "ok" for event in history.events)
    kept = ("depth", "weight", "keys") if failed else ()
    left = {name: value for name in ZERO if name not in kept and (value := getattr(seen, name, 0))}
    found = [f"at the end the channel still has {left}"] if left else []
    if seen.dead_letters != len(history.dead):
        found.append(f"{seen.dead_letters} dead letters are counted, {len(history.dead)} are there")
    return found + ([] if history.killed else miscounted(history))


def miscounted(history: History) -> list[str]:
    """Counts of puts and gets that differ from what the tasks saw."""
    seen = history.statistics
    assert seen is not None
    fates = _Fates(history)
    settled = (fates.consumed + fates.dead).total()
    if seen.puts - seen.gets != seen.depth:
        return [f"{seen.puts} puts and {seen.gets} gets are counted, and {seen.depth} are queued"]
    unsure = fates.unknown.total() + seen.refused
    if not settled <= seen.gets <= settled + unsure:
        return [f"{seen.gets} gets are counted, and {settled} items were consumed"]
    return []


def described(event: Event) -> str:
    """An event, for a person."""
    key = "" if event.key is None else f" key={event.key!r}"
    return f"task {event.task} {event.do}{key} {named(event.items)} ({event.outcome or 'waits'})"


def named(items: list[int]) -> str:
    """Items by task and count, the first of them."""
    shown = " ".join(f"{item >> 20}:{item & 0xFFFFF}" for item in items[:12])
    return f"[{shown}{' ...' if len(items) > 12 else ''}]"
