"""An arm of two joints in a plane reaches a point: a task for MuJoCo's physics in JAX.

Used by ``mjx_reacher.toml``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

XML = """\
<mujoco>
  <option timestep="0.01" iterations="1" ls_iterations="4" integrator="Euler" gravity="0 0 0">
    <flag contact="disable" eulerdamp="disable"/>
  </option>
  <worldbody>
    <body>
      <joint name="shoulder" type="hinge" axis="0 0 1" damping="0.1" armature="0.01"/>
      <geom type="capsule" fromto="0 0 0 0.1 0 0" size="0.01" mass="0.05"/>
      <body pos="0.1 0 0">
        <joint name="elbow" type="hinge" axis="0 0 1" damping="0.1" armature="0.01"/>
        <geom type="capsule" fromto="0 0 0 0.1 0 0" size="0.01" mass="0.05"/>
        <site name="hand" pos="0.11 0 0"/>
      </body>
    </body>
  </worldbody>
  <actuator>
    <velocity joint="shoulder" kv="0.4" ctrllimited="true" ctrlrange="-6 6"/>
    <velocity joint="elbow" kv="0.4" ctrllimited="true" ctrlrange="-6 6"/>
  </actuator>
</mujoco>
"""
NEAR = 0.03  # metres from hand to point that are near enough


class Reacher:
    """Shows the joints, the point, and the way to it; pays for how near the hand is."""

    xml = XML
    steps = 4

    def begin(self, key: Any, qpos: Any, qvel: Any) -> tuple[Any, Any, Mapping[str, Any]]:
        joints, far, angle = jax.random.split(key, 3)
        qpos = jax.random.uniform(joints, qpos.shape, minval=-3.0, maxval=3.0)
        radius = jax.random.uniform(far, (), minval=0.05, maxval=0.2)
        turned = jax.random.uniform(angle, (), minval=-jnp.pi, maxval=jnp.pi)
        target = radius * jnp.stack([jnp.cos(turned), jnp.sin(turned)])
        return qpos, jnp.zeros_like(qvel), {"target": target}

    def observe(self, data: Any, held: Mapping[str, Any]) -> Any:
        way = held["target"] - data.site_xpos[0, :2]
        joints = [jnp.cos(data.qpos), jnp.sin(data.qpos), 0.1 * data.qvel]
        return jnp.concatenate([*joints, 5.0 * held["target"], 5.0 * way])

    def pay(self, data: Any, action: Any, held: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        distance = jnp.linalg.norm(held["target"] - data.site_xpos[0, :2])
        near = distance < NEAR
        return near - 5.0 * distance, jnp.zeros((), bool), near
