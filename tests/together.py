"""Which tests stay together in one process, with pytest-xdist, and whose turn is when."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

TOGETHER = ("backends/vllm", "gpu", "runtime/ray/training", "view")
"""Folders whose files stay together too: they share engines, a device, a Ray, or a browser."""


LONGEST = (
    "examples/test_examples",
    "runtime/ray/training",
    "runtime/ray/test_cluster",
    "backends/vllm",
    "jobs/on_hosts/test_on_hosts",
    "backends/megatron/test_trainer",
    "jobs/embodied/test_killed_driver",
    "bench/test_reshard_bench",
    "jobs/language/test_killed_engine",
    "bench/test_channels_bench",
    "jobs/language/test_killed_driver",
    "jobs/language/test_scheduled",
    "jobs/test_on_ray",
    "bench/test_calibrate_bench",
    "backends/megatron/test_walks",
    "backends/megatron/test_stages",
    "runtime/ray/test_training_placement",
    "bench/test_overlap_bench",
    "workers/rollout/test_language_engines",
    "docs/test_documentation",
    "net/test_cuts",
    "backends/rescale/test_faults",
    "jobs/language/test_checkpoint_folders",
    "jobs/embodied_sac/test_runs",
    "bench/test_rollout_bench",
    "jobs/embodied/test_killed_workers",
    "jobs/embodied/test_gone_wrong",
    "jobs/language/test_killed_workers",
    "backends/language/test_publishing_in_place",
    "net/test_two_hosts",
)
"""What begins first, because it takes from ten seconds to minutes: what begins last is short, and
no process is left to work alone. In the order of what they take, so that parts of them take as long
as one another."""


class Part(NamedTuple):
    """A part of the `LONGEST`: each ``of``-th, from ``number`` on."""

    number: int
    of: int

    @classmethod
    def read(cls, text: str) -> Part:
        """Read ``2/3``. Raises `ValueError`."""
        number, of = (int(one) for one in text.split("/"))
        if not 0 <= number < of:
            raise ValueError(f"{text}: the parts are 0/{of} to {of - 1}/{of}")
        return cls(number, of)

    def has(self, nodeid: str) -> bool:
        """Whether a test is run with this part: those that are not long always are."""
        group = group_of(nodeid)
        return group not in LONGEST or LONGEST.index(group) % self.of == self.number


class FilesTogether(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Hands out whole files."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def remove_node(self, node: WorkerController) -> str | None:
        """Go on without a process, and without the test in which it ended: xdist would run that
        again, and end process after process."""
        units = self.assigned_work[node].values()
        left = [(unit, test) for unit in units for test, done in unit.items() if not done]
        for unit, test in left[:1]:
            unit[test] = True
        super().remove_node(node)
        return left[0][1] if left else None


def turn(nodeid: str) -> int:
    """Whose turn it is first has the lowest."""
    group = group_of(nodeid)
    return LONGEST.index(group) if group in LONGEST else len(LONGEST)


def group_of(nodeid: str) -> str:
    """The file of a test, or the folder that stays together."""
    file = nodeid.partition("::")[0].removeprefix("tests/").removesuffix(".py")
    folder = file.rpartition("/")[0]
    return folder if folder in TOGETHER else file
