"""Thresholds: what the rules' headers say, and what a site, a model or a node says instead.

`compile_limits` writes the result to table `limits`, one row per rule, name, node and model; per rule a view
`limits_<rule>` shows them as one row per (node, model), which the rule joins.
Layers: default < model < site < node.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

import duckdb
import msgspec

from gpufleet.config import ConfigError
from gpufleet_collector.rules import Need, Rule, quoted, seconds


class Limit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One threshold and who says so."""

    value: float
    source: str = "configuration"


LONGEST_S = 366 * 86400
"""No duration of the configuration is longer: time arithmetic would leave the calendar."""

Limits = dict[str, dict[str, Limit]]
"""rule -> name -> limit."""


class Scope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `[model."H100"]` or `[node."gpu-001"]` may hold."""

    limit: Limits = {}


class RuleOverride(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[rule.<rule>]`: what a site runs differently. None = as the rule's header says."""

    every: str | None = None
    for_: str | None = msgspec.field(default=None, name="for")
    clear_after: str | None = None
    min_duration: str | None = None
    boot_grace: str | None = None
    enabled: bool = True
    shadow: bool | None = None


class JudgeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[judge]`: how the judge itself runs.

    Attributes:
        every: Between two passes.
        warm_up: Longest wait after a start for the agents that were known before.
        rule_timeout: A rule that takes longer is stopped, reported and tried again when it is due.
    """

    every: str = "5s"
    warm_up: str = "120s"
    rule_timeout: str = "10s"


class JudgeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of the collector's configuration that is about judgement; a base for the whole of it."""

    judge: JudgeOptions = JudgeOptions()
    limit: Limits = {}
    model: dict[str, Scope] = {}
    node: dict[str, Scope] = {}
    rule: dict[str, RuleOverride] = {}


def check_settings(settings: JudgeSettings, rules: Sequence[Rule]) -> None:
    """Refuse names that no rule has.

    Raises:
        ConfigError: Unknown rule or limit, or a number, duration or "k of n" that makes no sense.
    """
    for key in ("every", "rule_timeout", "warm_up"):
        _duration(f"[judge] {key}", getattr(settings.judge, key), may_be_zero=key == "warm_up")
    known = {rule.name: rule for rule in rules}
    layers = [("limit", settings.limit)]
    layers += [(f'model."{name}".limit', scope.limit) for name, scope in settings.model.items()]
    layers += [(f'node."{name}".limit', scope.limit) for name, scope in settings.node.items()]
    for where, limits in layers:
        for rule, names in limits.items():
            if rule not in known:
                raise ConfigError(f"[{where}.{rule}]: no such rule; there are {', '.join(sorted(known))}")
            for name, limit in names.items():
                if name not in known[rule].header.limits:
                    there = ", ".join(sorted(known[rule].header.limits)) or "none"
                    raise ConfigError(f"[{where}.{rule}.{name}]: the rule has no such limit; it has {there}")
                if not math.isfinite(limit.value):
                    raise ConfigError(f"[{where}.{rule}.{name}] value: {limit.value} is not a number")
    for name, changed in settings.rule.items():
        if name not in known:
            raise ConfigError(f"[rule.{name}]: no such rule; there are {', '.join(sorted(known))}")
        _check_override(f"[rule.{name}]", changed)


def _check_override(where: str, changed: RuleOverride) -> None:
    for key in ("every", "clear_after", "min_duration", "boot_grace"):
        text = getattr(changed, key)
        if text is not None:
            _duration(f"{where} {key}", text, may_be_zero=key != "every")
    if changed.for_ is not None:
        try:
            Need.parse(changed.for_)
        except ValueError as error:
            raise ConfigError(f"{where} for: {error}") from error


def _duration(where: str, text: str, may_be_zero: bool) -> None:
    try:
        value = seconds(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    if value == 0 and not may_be_zero:
        raise ConfigError(f"{where}: must be above 0")
    if value > LONGEST_S:
        raise ConfigError(f"{where}: {text!r} is more than a year")


def layered(
    rule: Rule, settings: JudgeSettings, node: str, model: str
) -> Mapping[str, tuple[float, str, str]]:
    """Name -> (value, layer, source) of `rule` for one node and card model."""
    out = {name: (limit.value, "default", limit.source) for name, limit in rule.header.limits.items()}
    by_model = _model_scope(settings.model, model)
    layers = [
        ("model", by_model.limit if by_model else {}),
        ("site", settings.limit),
        ("node", settings.node[node].limit if node in settings.node else {}),
    ]
    for layer, limits in layers:
        for name, limit in limits.get(rule.name, {}).items():
            out[name] = (limit.value, layer, limit.source)
    return out


def compile_limits(
    write: duckdb.DuckDBPyConnection,
    rules: Iterable[Rule],
    settings: JudgeSettings,
    pairs: Iterable[tuple[str, str]],
) -> None:
    """Write table `limits` anew for these (node, model) pairs. Call inside `Store.transaction()`."""
    everyone = sorted(set(pairs))
    own = [node if node in settings.node else "" for node, _ in everyone]  # all others have the same limits
    rows = [
        (rule.name, name, node, model, value, layer, source)
        for rule in rules
        for node, model in sorted({(key, model) for key, (_, model) in zip(own, everyone, strict=True)})
        for name, (value, layer, source) in layered(rule, settings, node, model).items()
    ]
    write.execute("DELETE FROM live.limits")
    write.execute(
        "INSERT INTO live.limits (rule, name, node, model, value, layer, source) "
        "SELECT r.rule, r.name, p.node, r.model, r.value, r.layer, r.source FROM ("
        "SELECT unnest(?::VARCHAR[]) AS rule, unnest(?::VARCHAR[]) AS name, unnest(?::VARCHAR[]) AS own, "
        "unnest(?::VARCHAR[]) AS model, unnest(?::DOUBLE[]) AS value, unnest(?::VARCHAR[]) AS layer, "
        "unnest(?::VARCHAR[]) AS source) r JOIN ("
        "SELECT unnest(?::VARCHAR[]) AS node, unnest(?::VARCHAR[]) AS model, unnest(?::VARCHAR[]) AS own"
        ") p ON p.own = r.own AND p.model = r.model ORDER BY r.rule",
        [
            *([row[at] for row in rows] for at in range(7)),
            [node for node, _ in everyone],
            [model for _, model in everyone],
            own,
        ],
    )


def limits_view(rule: Rule) -> str:
    """The statement that makes `limits_<rule>`: one row per (node, model), a column per limit."""
    columns = "".join(f", max(value) filter (name = {quoted(name)}) as {name}" for name in rule.header.limits)
    return (
        f"create or replace view limits_{rule.name} as "
        f"select node, model{columns} from limits where rule = {quoted(rule.name)} group by node, model"
    )


def _model_scope(models: Mapping[str, Scope], model: str) -> Scope | None:
    """The scope whose name is a run of whole words of `model`; the longest wins (L4 is not in L40S)."""
    words = _words(model)
    best: tuple[int, Scope] | None = None
    for name, scope in models.items():
        wanted = _words(name)
        runs = (words[at : at + len(wanted)] for at in range(len(words) - len(wanted) + 1))
        if wanted and any(run == wanted for run in runs) and (best is None or len(wanted) > best[0]):
            best = (len(wanted), scope)
    return best[1] if best else None


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())
