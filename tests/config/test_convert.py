"""What a number may be, and where an error of a table says that it stands."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rlinf_async.config import ConfigError, Document


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lr: float = 1e-3
    clip: float | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    shares: dict[str, float] = {}
    options: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ConfigError("it must be above 0", path=("lr",))


class Outer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    inner: Limits = Limits()


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    ("setting", "text"),
    [("lr", "{}"), ("clip", "{}"), ("betas", "[0.9, {}]"), ("shares.a", "{}")],
)
@pytest.mark.parametrize("by_flag", [False, True])
def test_no_number_of_a_setting_is_infinite_or_nan(
    number: str, setting: str, text: str, by_flag: bool
) -> None:
    value = text.format(number)
    document = Document("run.toml", "" if by_flag else f"[inner]\n{setting} = {value}\n")
    flags = {f"inner.{setting}": value} if by_flag else {}
    with pytest.raises(ConfigError, match=rf"inner\.{setting}.*{number}; it must be a finite"):
        document.to(Outer, flags)


def test_what_is_of_any_type_may_be_infinite() -> None:
    read = Document("run.toml", "[inner.options]\nlimit = inf\n").to(Outer)
    assert read.inner.options == {"limit": float("inf")}


def test_an_error_of_a_table_inside_has_the_whole_path() -> None:
    with pytest.raises(ConfigError, match=r"^run\.toml:2: inner\.lr: it must be above 0"):
        Document("run.toml", "[inner]\nlr = 0.0\n").to(Outer)
