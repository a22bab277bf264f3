"""Ray's runtime environments: checked before anything is started in them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from rlinf_async.config.errors import nearest
from rlinf_async.runtime.ray.library import of_ray
from rlinf_async.workers.errors import BuildError

PLUGINS: Final = "RAY_RUNTIME_ENV_PLUGINS"
"""environment variable by which Ray learns of further fields"""


def check_runtime_env(runtime_env: Mapping[str, Any], whose: str) -> None:
    """Check a runtime environment as far as it can be here.

    Args:
        whose: of what it is, for the error.

    Raises:
        BuildError: a field that Ray does not know, or a value of another type.
    """
    described = of_ray("runtime_env").RuntimeEnv
    known = sorted(name for name in described.known_fields if not name.startswith("_"))
    unknown = sorted(set(runtime_env) - set(described.known_fields))
    if unknown and not os.environ.get(PLUGINS):
        raise BuildError(
            f"{whose}: runtime_env has no field {unknown[0]!r}{nearest(unknown[0], known)}: there "
            f"are {', '.join(known)}"
        )
    try:
        described(**runtime_env)
    except (TypeError, ValueError) as error:
        raise BuildError(f"{whose}: runtime_env={dict(runtime_env)}: {error}") from error
