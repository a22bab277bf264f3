"""Who held which devices when: one panel for each policy, over the same time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlinf_async.observe.figures import COLOURS, FAINT, INK, headline, new_figure, quiet, save
from rlinf_async.simulate.run import Record

ROLES = ("rollout", "actor")
IDLE = "#eceff3"


def draw_devices(records: Sequence[Record], path: Path, *, title: str) -> None:
    """Draw the devices that each role holds and has busy, and what is left to generate.

    Raises `RunFolderError` where the file cannot be written.
    """
    figure = new_figure(11.0, 1.0 + 2.2 * len(records))
    headline(figure, title)
    end = max(record.history[-1].time for record in records)
    panels = [figure.add_subplot(len(records), 1, place + 1) for place in range(len(records))]
    for place, (axes, record) in enumerate(zip(panels, records, strict=True)):
        times = np.array([one.time for one in record.history])
        below = np.zeros(len(times))
        for colour, role in zip(COLOURS, ROLES, strict=False):
            held = np.array([one.held.get(role, 0) for one in record.history], float)
            busy = np.array([one.busy.get(role, 0) for one in record.history], float)
            axes.fill_between(
                times, below, below + busy, step="post", color=colour, label=f"{role}, busy", lw=0
            )
            axes.fill_between(
                times,
                below + busy,
                below + held,
                step="post",
                color=colour,
                alpha=0.25,
                label=f"{role}, waiting",
                lw=0,
            )
            below = below + held
        devices = record.result.devices
        axes.fill_between(times, below, devices, step="post", color=IDLE, label="nobody", lw=0)
        axes.set_xlim(0, end)
        axes.set_ylim(0, devices)
        axes.set_ylabel("devices", color=INK, fontsize=9)
        left = axes.twinx()
        left.plot(times, [one.left for one in record.history], color=INK, lw=1.0)
        left.set_ylabel("samples to generate", color=FAINT, fontsize=8)
        left.set_ylim(0, None)
        left.tick_params(colors=FAINT, labelsize=8)
        rate = record.result.samples_per_device_hour
        axes.set_title(
            f"{record.result.policy}: {rate:,.0f} samples per device-hour",
            loc="left",
            fontsize=10,
            color=INK,
        )
        quiet(axes)
        if place == 0:
            axes.legend(loc="upper right", fontsize=7, ncols=5, framealpha=0.9, edgecolor="none")
    panels[-1].set_xlabel("seconds of virtual time", color=INK, fontsize=9)
    save(figure, path)
