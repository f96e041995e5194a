"""Bad configuration is one line: file, key, what to do."""

import msgspec
import pytest

from gpufleet.config import ConfigError, parse


class Push(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    seal_s: float = 5.0


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    node: str


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    push: Push = Push()
    fault: tuple[Fault, ...] = ()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[push]\nseal_s = "x"', "a.toml: key push.seal_s: Expected `float`, got `str`"),
        ("[push]\nsael_s = 1", "a.toml: unknown key push.sael_s: remove it or correct its name"),
        ("nonsense = 1", "a.toml: unknown key nonsense: remove it or correct its name"),
        ("[[fault]]", "a.toml: key fault[0].node: is missing: add it"),
        ("[push", "a.toml: not valid TOML: "),
        ("\udce4", "a.toml: not valid TOML: "),
    ],
)
def test_one_line_names_file_and_key(text: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text.encode(errors="surrogateescape"), Config, "a.toml")
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_what_is_not_named_has_its_default() -> None:
    assert parse(b"[[fault]]\nnode = 'a'", Config, "a.toml") == Config(fault=(Fault(node="a"),))
