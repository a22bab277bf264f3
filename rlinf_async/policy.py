"""A trained policy outside of the framework.

::

    from rlinf_async import Policy

    policy = Policy.load("out/arm")        # what `rlinf-async export RUN out/arm` has written
    action = policy.act(observation)

Loading brings in what the folder's form needs: ``onnx`` onnxruntime and no torch, the other forms
torch; none of them channels, workers, Gymnasium or Ray.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.backends.policies.left import (
    FILES,
    MEMORY,
    NOISE,
    WEIGHTS,
    Form,
    Note,
    PolicyFolderError,
    read_note,
)
from rlinf_async.config import ConfigError, UsageError, needed
from rlinf_async.messages.converting import ActionReader, ObservationWriter
from rlinf_async.messages.described import Space
from rlinf_async.messages.embodied import Choice, Floats
from rlinf_async.messages.spaces import ObservationArray, all_finite, numbers_of


class ObservationError(ValueError):
    """An observation is not one of the policy's space; the text names the part."""


class Policy:
    """A trained policy that acts. Made by `load`; not thread-safe.

    Observations and actions have the form that the environment gave and took: arrays, numbers,
    texts, and dicts and tuples of them. A policy that answers with a chunk of ``k`` actions returns
    them as one array ``[k, A]``.
    """

    def __init__(self, note: Note, engine: _Engine) -> None:
        self.note = note
        self._engine = engine
        self._writer = ObservationWriter(note.spaces.observation, note.env)
        self._reader = ActionReader(note.spaces.action, note.env, note.actions)
        self._memory: Floats | None = None

    @classmethod
    def load(cls, folder: str | Path, *, seed: int = 0, device: str = "cpu") -> Policy:
        """Load a folder that ``rlinf-async export`` has written of a run in environments.

        Args:
            folder: the folder.
            seed: seed of sampled actions.
            device: device of the arithmetic, as torch calls it: of the form ``folder`` alone.

        Raises:
            PolicyFolderError: it holds no policy, or part of one.
            MissingExtra: a package that the form needs is not installed.
        """
        path = Path(folder).expanduser()
        note = read_note(path)
        if device != "cpu" and note.form not in WEIGHTS:
            raise UsageError(
                f"device is {device!r}, but a graph ({note.form!r}) runs on the CPU: leave it out, "
                "or load it by the runtime's own interface"
            )
        with _damage_named(path / FILES[note.form]):
            if note.form in WEIGHTS:
                return cls(note, _Served(note, path, seed, device))
            return cls(note, _Graph(note, _RUNTIMES[note.form](path / FILES[note.form]), seed))

    @property
    def observation_space(self) -> Space:
        """The space of an observation, as plain data."""
        return self.note.spaces.observation

    @property
    def action_space(self) -> Space:
        """The space of what `act` returns, as plain data."""
        return self.note.spaces.action

    @property
    def chunk(self) -> int:
        """Actions of an answer, to be executed one after the other before the next is asked for."""
        return max(self.note.policy.action_chunk, 1)

    @property
    def recurrent(self) -> bool:
        """Whether it remembers what it saw since `begin`."""
        return self._engine.memory_size > 0

    def begin(self, ended: Sequence[bool] | NDArray[np.bool_] | None = None) -> None:
        """Begin an episode: forget what was seen. ``ended``: of `act_all`, those which begin."""
        if ended is None or self._memory is None:
            self._memory = None
        else:
            self._memory[np.asarray(ended, np.bool_)] = 0.0

    def act(self, observation: Any, *, deterministic: bool = True) -> Any:
        """Return the action for an observation: the most likely one, or a sample.

        Raises:
            ObservationError: the observation is none of the space, or not finite.
        """
        row = self._writer.spec.empty(1)
        with self._named(lambda: self._writer.misfit(observation)):
            self._writer.write(observation, row[0])
        return self._answered(row, deterministic=deterministic)[0]

    def act_all(self, observations: Any, *, deterministic: bool = True) -> Any:
        """Return the actions for ``N`` observations, as `act`.

        Args:
            observations: arrays ``[N, ...]``, and dicts and tuples of them, as ``gymnasium.vector``
                gives them.
            deterministic: the most likely actions, not samples.

        Returns:
            An array ``[N, ...]``; a list where an action is a dict or tuple, or a single number.
        """
        rows = self._writer.spec.empty(_count(observations))
        with self._named(lambda: ""):
            self._writer.write_all(observations, rows)
        return self._answered(rows, deterministic=deterministic)

    def answers(self, rows: ObservationArray) -> Choice:
        """Return the most likely answers, before they become actions, for observations as rows of
        an array; a recurrent policy begins an episode with each."""
        return self._engine.answer(rows, None, deterministic=True)[0]

    def _answered(self, rows: ObservationArray, *, deterministic: bool) -> Any:
        numbers = numbers_of(rows)
        if numbers is not None and not all_finite(numbers):
            raise ObservationError(f"{self.note.env}: an observation has NaN or infinity")
        memory = self._memory
        if memory is not None and len(memory) != len(rows):
            raise ObservationError(
                f"{len(rows)} observations, but {len(memory)} before: the policy remembers what it "
                "saw; call begin() where episodes begin"
            )
        answer, self._memory = self._engine.answer(rows, memory, deterministic=deterministic)
        return self._reader.read(answer, len(rows))

    @contextlib.contextmanager
    def _named(self, misfit: Callable[[], str]) -> Iterator[None]:
        """Say which part of an observation does not fit."""
        try:
            yield
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            found = misfit() or (f"no {error}" if isinstance(error, KeyError) else str(error))
            raise ObservationError(
                f"{self.note.env}: {found}; the policy takes {self._writer.spec}"
            ) from error


class _Engine(Protocol):
    memory_size: int

    def answer(
        self, rows: ObservationArray, memory: Floats | None, *, deterministic: bool
    ) -> tuple[Choice, Floats | None]: ...


class _Served:
    """The policy of the framework, rebuilt with its weights."""

    def __init__(self, note: Note, folder: Path, seed: int, device: str) -> None:
        import torch
        from safetensors.torch import load_file

        from rlinf_async.backends.policies.serving import serve_policy
        from rlinf_async.weights.pack import pack

        config = note.policy
        if model := config.vision_language.folder:
            own = msgspec.structs.replace(config.vision_language, folder=str(folder / model))
            config = msgspec.structs.replace(config, vision_language=own)
        try:
            with torch.random.fork_rng(devices=[]):  # initial weights, which are replaced
                self._server: Any = serve_policy(config, seed, device)
        except (ConfigError, ValueError) as error:
            raise PolicyFolderError(f"{folder}: {error}") from error
        tensors = load_file(folder / FILES[note.form])
        if note.form == "lerobot":  # the others were in its own files
            tensors = self._server.policy.state_dict() | tensors
        _check_tensors(folder, tensors, self._server.policy.state_dict())
        self._server.load(pack(tensors, note.version))
        self.memory_size: int = getattr(self._server, "memory_size", 0)

    def answer(
        self, rows: ObservationArray, memory: Floats | None, *, deterministic: bool
    ) -> tuple[Choice, Floats | None]:
        server = self._server
        if not self.memory_size:
            return server.mode(rows) if deterministic else server.act(rows).action, None
        memory = _memory(memory, len(rows), self.memory_size)
        if deterministic:
            answer, after = server.mode_from(rows, memory)
            return answer, after
        answered = server.act_from(rows, memory)
        return answered.action, answered.memory


class _Run(Protocol):
    def __call__(self, feeds: dict[str, NDArray[Any]], /) -> Sequence[NDArray[Any]]: ...


class _Graph:
    """One graph, and the noise that it is given."""

    def __init__(self, note: Note, run: _Run, seed: int) -> None:
        self.run, self._note = run, note
        self._factors = note.policy.acts.factors
        self._random = np.random.default_rng(seed)
        self.memory_size = note.memory_size

    def answer(
        self, rows: ObservationArray, memory: Floats | None, *, deterministic: bool
    ) -> tuple[Choice, Floats | None]:
        feeds = self.feeds(rows, memory, deterministic=deterministic)
        _, answer, *after = self.run(feeds)
        return answer, after[0] if after else None

    def feeds(
        self, rows: ObservationArray, memory: Floats | None, *, deterministic: bool
    ) -> dict[str, NDArray[Any]]:
        """The graph's inputs by name, in their order."""
        feeds: dict[str, NDArray[Any]] = {}
        for port in self._note.inputs:
            if port.name == NOISE:
                feeds[port.name] = self._noise(len(rows), port.shape[0], zero=deterministic)
            elif port.name == MEMORY:
                feeds[port.name] = _memory(memory, len(rows), self.memory_size)
            else:
                feeds[port.name] = rows if rows.dtype.names is None else rows[port.name].copy()
        return feeds

    def _noise(self, count: int, size: int, *, zero: bool) -> Floats:
        if zero:
            return np.zeros((count, size), np.float32)
        drawn = [
            self._random.standard_normal((count, one.size))
            if one.kind == "continuous"
            else self._random.gumbel(size=(count, one.size))
            for one in self._factors
        ]
        return np.concatenate(drawn, 1).astype(np.float32)


def _of_onnx(file: Path) -> _Run:
    runtime = needed("onnxruntime", extra="deploy", needed_for="a policy in ONNX")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # quickest for small networks
    session = runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return lambda feeds: session.run(None, feeds)


def _of_torchscript(file: Path) -> _Run:
    import torch

    load: Any = torch.jit.load
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return _on_tensors(load(str(file)))


def _of_pt2(file: Path) -> _Run:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _on_tensors(torch.export.load(file).module())


def _on_tensors(module: Any) -> _Run:
    import torch

    def run(feeds: dict[str, NDArray[Any]]) -> Sequence[NDArray[Any]]:
        with torch.no_grad():
            return [one.numpy() for one in module(*map(torch.from_numpy, feeds.values()))]

    return run


_RUNTIMES: dict[Form, Any] = {
    "onnx": _of_onnx,
    "torchscript": _of_torchscript,
    "pt2": _of_pt2,
}


def _memory(memory: Floats | None, count: int, size: int) -> Floats:
    return np.zeros((count, size), np.float32) if memory is None else memory


@contextlib.contextmanager
def _damage_named(file: Path) -> Iterator[None]:
    """Name the file that a library cannot read."""
    try:
        yield
    except (UsageError, ModuleNotFoundError):
        raise
    except Exception as error:  # each library has its own
        raise PolicyFolderError(
            f"{file} cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def _check_tensors(folder: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise `PolicyFolderError` where weights or statistics are missing, or of another policy."""
    missing = sorted(wanted.keys() - found.keys())
    statistics = [name for name in missing if name.startswith("observation_normalizer.")]
    file = folder / FILES["folder"]  # that of the form "lerobot" has the same name
    if statistics:
        raise PolicyFolderError(
            f"{file} lacks {statistics[0]!r}: without the statistics by which observations are "
            "normalised the policy would act wrongly; export it again"
        )
    others = [
        name for name, one in found.items() if name not in wanted or one.shape != wanted[name].shape
    ]
    if missing or others:
        raise PolicyFolderError(
            f"{file} does not hold the policy that policy.json describes: "
            + (f"it lacks {missing[0]!r}" if missing else f"{others[0]!r} is of another")
        )


def _count(observations: Any) -> int:
    """``N``, of arrays, and dicts and tuples of them."""
    while isinstance(observations, (dict, tuple)):
        parts = list(observations.values()) if isinstance(observations, dict) else observations
        if not parts:
            raise ObservationError("the observations are empty")
        observations = parts[0]
    try:
        return len(observations)
    except TypeError:
        raise ObservationError(
            f"act_all takes arrays of many observations, not {type(observations).__name__}: for "
            "one, call act"
        ) from None
