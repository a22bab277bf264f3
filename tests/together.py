"""Which tests stay together in one process, with pytest-xdist, and whose turn is when."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

TOGETHER = ("backends/vllm", "gpu", "runtime/ray/training", "view")
"""Folders whose files stay together too: they share engines, a device, a Ray, or a browser."""


LONGEST = {
    "examples/test_examples": 1163,
    "jobs/on_hosts/test_on_hosts": 448,
    "jobs/test_on_ray": 268,
    "runtime/ray/test_cluster": 215,
    "runtime/ray/training": 206,
    "backends/vllm": 181,
    "bench/test_episodes_bench": 151,
    "episodes/environments/test_verifiers": 146,
    "docs/test_tutorials": 143,
    "episodes/endpoint/test_unchanged_programs": 137,
    "jobs/language/test_scheduled": 126,
    "backends/megatron/test_trainer": 115,
    "jobs/language/test_distillation": 112,
    "bench/test_reshard_bench": 108,
    "architecture/test_packaging": 102,
    "jobs/embodied/test_killed_driver": 102,
    "jobs/language/test_episodes": 100,
    "workers/env/test_real_time": 100,
    "runtime/ray/test_training_placement": 93,
    "jobs/embodied/test_fits": 92,
    "jobs/language/test_killed_engine": 89,
    "net/test_cuts": 85,
    "bench/test_calibrate_bench": 85,
    "jobs/embodied_sac/test_runs": 81,
    "jobs/embodied/test_curriculum": 76,
    "workers/env/test_faults": 75,
    "backends/language/test_episodes": 73,
    "episodes/environments/test_openenv": 73,
    "jobs/language/test_checkpoint_folders": 70,
    "jobs/language/test_killed_driver": 67,
    "typing/test_snippets": 66,
    "docs/test_documentation": 65,
    "jobs/test_from_python": 65,
    "jobs/language/test_killed_workers": 61,
    "jobs/embodied/test_runs": 61,
    "bench/test_channels_bench": 60,
    "backends/megatron/test_walks": 59,
    "backends/language/test_distillation": 58,
    "jobs/supervised/test_runs": 58,
    "jobs/language/test_resumed": 57,
    "jobs/embodied_offline/test_offline": 53,
    "jobs/language/test_lora": 52,
    "jobs/language/test_runs": 52,
    "jobs/embodied/test_expert_flow": 49,
    "episodes/test_mcp": 48,
    "jobs/embodied/test_failing_envs": 48,
    "jobs/embodied_sac/test_intervention": 48,
    "jobs/language/test_evaluation": 47,
    "jobs/embodied/test_targets": 47,
    "workers/rollout/test_language_engines": 46,
    "jobs/language/test_critic": 45,
    "runtime/test_fork_server": 45,
    "jobs/embodied/test_gone_wrong": 44,
    "bench/test_rollout_bench": 43,
    "bench/test_overlap_bench": 43,
    "backends/megatron/test_stages": 43,
    "bench/test_grpo_bench": 41,
    "net/test_two_hosts": 40,
    "backends/test_leaving": 40,
    "outside/test_outside": 40,
    "backends/expert_flow/test_sharded": 40,
    "jobs/language/test_own_teacher": 38,
    "jobs/language/test_off_policy": 37,
    "runtime/test_deadlock": 37,
    "channels/test_stealing": 36,
    "jobs/embodied_sac/test_demonstrations": 36,
    "jobs/embodied_sac/test_hindsight": 36,
    "runtime/test_replace": 35,
    "backends/megatron/test_rescale": 34,
    "backends/language/test_publishing_in_place": 34,
    "jobs/language/test_evaluate": 34,
    "jobs/test_embodied_kills": 34,
    "jobs/language/test_gone_wrong": 32,
    "backends/megatron/test_feed": 31,
    "jobs/language/test_group_verifiers": 31,
    "jobs/language/test_resharded": 31,
    "workers/actor/language/test_megatron_actor": 31,
    "channels/model/test_programs": 30,
    "view": 30,
    "jobs/language/test_own_parts": 29,
    "jobs/language/test_sampling": 29,
    "jobs/embodied/test_killed_workers": 28,
    "runtime/test_failures": 28,
    "episodes/endpoint/test_clients": 27,
    "backends/rescale/test_rescale": 27,
    "jobs/language/test_pushed": 27,
    "jobs/embodied/test_hooks": 27,
    "jobs/language/test_megatron": 26,
    "jobs/language/test_reward_model": 26,
    "jobs/test_agreement": 26,
    "jobs/embodied/test_beginning": 26,
    "backends/checkpoint/test_damage": 25,
    "runtime/test_cancellation": 25,
    "simulate/test_episodes": 25,
    "episodes/test_command": 24,
    "jobs/language/test_named": 24,
    "jobs/language/test_swapped": 24,
    "runtime/test_process_life": 24,
    "workers/scheduler/test_faults": 24,
    "workers/scheduler/test_guest": 24,
    "docs/test_site": 23,
    "bench/test_embodied_bench": 23,
    "workers/env/test_collect": 23,
    "jobs/embodied/test_judged_elsewhere": 23,
    "backends/language/test_sampled_distributions": 22,
    "episodes/environments/test_textarena": 22,
    "jobs/world_model/test_runs": 22,
    "architecture/test_ways": 21,
    "runtime/test_stopped": 21,
    "backends/rescale/test_faults": 19,
    "channels/wire/test_prefetch": 19,
    "backends/checkpoint/test_resharding": 18,
    "episodes/endpoint/test_bad_input": 17,
    "backends/language/test_critic_trainer": 17,
    "backends/transformers/test_engine": 16,
    "channels/wire/test_shared_memory_processes": 16,
    "channels/wire/test_very_large_items": 15,
    "backends/checkpoint/test_killed": 15,
    "channels/test_invariants": 13,
    "backends/reshard/test_executor": 12,
}
"""What begins first, and the seconds that it took on two busy cores: what begins last is short, and
no process is left to work alone."""


class Part(NamedTuple):
    """A part of the `LONGEST`: parts take about as long as one another."""

    number: int
    of: int

    @classmethod
    def read(cls, text: str) -> Part:
        """Read ``2/3``. Raises `ValueError`."""
        number, of = (int(one) for one in text.split("/"))
        if not 0 <= number < of:
            raise ValueError(f"{text}: the parts are 0/{of} to {of - 1}/{of}")
        return cls(number, of)

    def left_out(self) -> set[str]:
        """Return the files and folders of the other parts: each goes where least is so far."""
        seconds = [0] * self.of
        others = set()
        for group, took in LONGEST.items():
            part = seconds.index(min(seconds))
            seconds[part] += took
            if part != self.number:
                others.add(group)
        return others


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
    return list(LONGEST).index(group) if group in LONGEST else len(LONGEST)


def group_of(nodeid: str) -> str:
    """The file of a test, or the folder that stays together."""
    file = nodeid.partition("::")[0].removeprefix("tests/").removesuffix(".py")
    folder = file.rpartition("/")[0]
    return folder if folder in TOGETHER else file
