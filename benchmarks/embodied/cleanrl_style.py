"""PPO in one file, as CleanRL documents it, over EnvPool: prints speed and return as JSON.

    python cleanrl_style.py SEED THREADS [TOTAL_STEPS]

The recipe is that of CleanRL's documentation for continuous actions: Adam with eps 1e-5 and a
learning rate that falls linearly, orthogonal initialisation, tanh 64x64 for actor and critic, GAE,
advantages normalised in each minibatch, clipped policy loss, clipped value loss, gradients
clipped. Sizes are those of ``half_cheetah_envpool.toml``. The text is ours. Seconds are those of
training: imports and the making of the environments do not count.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

ENV, ENVS, STEPS, TOTAL = "HalfCheetah-v4", 32, 64, 196_608
EPOCHS, MINIBATCH, LR, GAMMA, LAMBDA, CLIP = 10, 256, 3e-4, 0.99, 0.95, 0.2
MAX_GRAD_NORM, VALUE_COEFFICIENT = 0.5, 0.5
LAST_EPISODES = 32
SKIPPED = 77
"""Exit code that the harness takes for "cannot run here"."""


def linear(inputs: int, outputs: int, gain: float = 2**0.5) -> nn.Linear:
    """A layer with orthogonal weights and no bias."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def network(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """tanh 64x64."""
    return nn.Sequential(
        linear(inputs, 64), nn.Tanh(), linear(64, 64), nn.Tanh(), linear(64, outputs, gain)
    )


class Agent(nn.Module):
    """Actor and critic."""

    def __init__(self, observations: int, actions: int) -> None:
        super().__init__()
        self.critic = network(observations, 1, 1.0)
        self.actor = network(observations, actions, 0.01)
        self.log_std = nn.Parameter(torch.zeros(actions))

    def evaluate(self, seen: Tensor, action: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Actions (sampled where none are given), their log-probs, and values."""
        mean = self.actor(seen)
        normal: Any = torch.distributions.Normal(mean, self.log_std.exp().expand_as(mean))
        taken: Tensor = normal.sample() if action is None else action
        return taken, normal.log_prob(taken).sum(1), self.critic(seen)[:, 0]


class Rollout:
    """One iteration: ``[STEPS, ENVS]``."""

    def __init__(self, observations: int, actions: int) -> None:
        self.seen = torch.zeros(STEPS, ENVS, observations)
        self.action = torch.zeros(STEPS, ENVS, actions)
        self.log_prob, self.reward, self.done, self.value = torch.zeros(4, STEPS, ENVS)

    def advantages(self, next_value: Tensor, next_done: Tensor) -> Tensor:
        """GAE."""
        advantages = torch.zeros_like(self.reward)
        following = torch.zeros(ENVS)
        for step in reversed(range(STEPS)):
            last = step == STEPS - 1
            going = 1.0 - (next_done if last else self.done[step + 1])
            value = next_value if last else self.value[step + 1]
            delta = self.reward[step] + GAMMA * value * going - self.value[step]
            following = delta + GAMMA * LAMBDA * going * following
            advantages[step] = following
        return advantages


def update(agent: Agent, optimizer: torch.optim.Adam, data: Rollout, advantages: Tensor) -> None:
    """Ten passes over one iteration."""
    seen, action = data.seen.flatten(0, 1), data.action.flatten(0, 1)
    log_prob, value = data.log_prob.flatten(), data.value.flatten()
    advantage, returns = advantages.flatten(), (advantages + data.value).flatten()
    order = np.arange(len(value))
    for _ in range(EPOCHS):
        np.random.shuffle(order)
        for start in range(0, len(order), MINIBATCH):
            batch = order[start : start + MINIBATCH]
            _, new, values = agent.evaluate(seen[batch], action[batch])
            ratio = (new - log_prob[batch]).exp()
            gain = advantage[batch]
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            policy = torch.max(-gain * ratio, -gain * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
            bounded = value[batch] + (values - value[batch]).clamp(-CLIP, CLIP)
            errors = torch.max((values - returns[batch]) ** 2, (bounded - returns[batch]) ** 2)
            loss = policy + VALUE_COEFFICIENT * 0.5 * errors.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
            optimizer.step()


def train(envs: Any, total: int) -> tuple[float, list[float]]:
    """Seconds of the training, and the returns of its episodes."""
    observations, actions = envs.observation_space.shape[0], envs.action_space.shape[0]
    low, high = envs.action_space.low, envs.action_space.high
    agent = Agent(observations, actions)
    optimizer = torch.optim.Adam(agent.parameters(), lr=LR, eps=1e-5)
    data = Rollout(observations, actions)
    returns, running = list[float](), np.zeros(ENVS)
    start = time.perf_counter()
    seen, done = torch.as_tensor(envs.reset()[0], dtype=torch.float32), torch.zeros(ENVS)
    iterations = -(-total // (STEPS * ENVS))
    for iteration in range(iterations):
        optimizer.param_groups[0]["lr"] = LR * (1.0 - iteration / iterations)
        for step in range(STEPS):
            data.seen[step], data.done[step] = seen, done
            with torch.no_grad():
                action, data.log_prob[step], data.value[step] = agent.evaluate(seen, None)
            data.action[step] = action
            shown, reward, ended, cut, _ = envs.step(np.clip(action.numpy(), low, high))
            running += reward
            over = ended | cut
            returns += running[over].tolist()
            running[over] = 0.0
            data.reward[step] = torch.as_tensor(reward)
            seen = torch.as_tensor(shown, dtype=torch.float32)
            done = torch.as_tensor(over, dtype=torch.float32)
        with torch.no_grad():
            last = agent.critic(seen)[:, 0]
        update(agent, optimizer, data, data.advantages(last, done))
    return time.perf_counter() - start, returns


def main(seed: int, threads: int, total: int = TOTAL) -> int:
    """Train, and print what was measured."""
    try:
        envpool = importlib.import_module("envpool")
    except ModuleNotFoundError:
        print("pip install 'rlinf-async[envpool]' (740 MB)", file=sys.stderr)
        return SKIPPED
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    np.random.seed(seed)
    with warnings.catch_warnings():  # of gymnasium, about bounds that become float32
        warnings.simplefilter("ignore", UserWarning)
        envs = envpool.make(ENV, env_type="gymnasium", num_envs=ENVS, seed=seed, num_threads=2)
    seconds, returns = train(envs, total)
    steps = -(-total // (STEPS * ENVS)) * STEPS * ENVS
    measured = {"steps_per_second": steps / seconds}
    if returns:
        measured["train_return"] = float(np.mean(returns[-LAST_EPISODES:]))
    print(json.dumps(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main(*(int(argument) for argument in sys.argv[1:])))
