"""`fleet explain`: why. Rule, numbers, window, limit, and who set it."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime

import click

from gpufleet import catalogue
from gpufleet_cli import errors, render, show
from gpufleet_cli.client import Client, Json
from gpufleet_cli.render import Column, clock
from gpufleet_cli.settings import Settings, options, settings_of
from gpufleet_cli.verbs.node import limit_of


@click.command(short_help="Why something is judged as it is.")
@click.argument("subject", nargs=-1, required=True)
@options
@click.pass_context
def explain(context: click.Context, subject: tuple[str, ...]) -> None:
    """Why it is judged so: `rule NAME`, `incident N`, `node NAME`, or one id that says which it is.

    `xid N` and `sxid N` say what an error number means, without a collector.
    """
    if len(subject) == 2 and subject[0].lower() in ("xid", "sxid"):
        number = _error_number(subject[1])
        show.emit(_meaning(subject[0].lower(), number), _meaning_screen, settings_of(context))
        context.exit(errors.OK)

    def fetch(client: Client) -> Json:
        from gpufleet.v1 import fleet_pb2

        return client.document(client.stub.Explain, fleet_pb2.ExplainRequest(subject=" ".join(subject)), 30.0)

    show.show(context, fetch, _screen, lambda _: errors.OK)


def _error_number(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise click.UsageError(f"{text!r:.40} is no error number: give e.g. xid 79")
    return int(text)


def _meaning(kind: str, number: int) -> Json:
    """What the catalogue that came with this command knows of a number, as a document."""
    found = catalogue.xid(number) if kind == "xid" else catalogue.sxid(number)
    entry = found or catalogue.unknown(number, "gpu" if kind == "xid" else "fabric")
    return {
        "api_version": "fleet/v1",
        "kind": "ErrorMeaning",
        "generated_at": datetime.now(UTC).replace(tzinfo=None).isoformat() + "Z",
        "items": [
            {
                "error": kind,
                "number": number,
                "name": entry.name,
                "meaning": entry.meaning,
                "severity": entry.severity,
                "verdict": entry.level or None,
                "scope": entry.scope,
                "action": entry.action,
                "advice": catalogue.ACTIONS[entry.action],
                "basis": entry.basis,
            }
        ],
    }


def _meaning_screen(document: Json, settings: Settings) -> str:
    (item,) = render.items(document, "items")
    number = int(str(item["number"]))
    return catalogue.explain_xid(number) if item["error"] == "xid" else catalogue.explain_sxid(number)


def _screen(document: Json, settings: Settings) -> str:
    """One block per rule that says something; of many, those with nothing to say are a few lines."""
    limit = limit_of(settings)
    found = render.items(document, "items")
    judged = [item for item in found if render.items(item, "verdicts") or render.items(item, "findings")]
    told = [item for item in judged if _says_something(item)] if len(judged) > 1 else judged or found[:1]
    blocks = [_block(item, settings, limit) for item in told]
    blocks.append(_quiet([item for item in found if item not in told], limit))
    return "\n\n".join("\n".join(block) for block in blocks if block) or "nothing to explain"


def _says_something(item: render.Json) -> bool:
    return bool(render.items(item, "findings")) or any(map(_is_bad, render.items(item, "verdicts")))


def _is_bad(verdict: render.Json) -> bool:
    return verdict.get("verdict") in ("warn", "crit")


def _quiet(items: Sequence[render.Json], limit: int) -> list[str]:
    """The rules that find nothing: which are ok, and which cannot judge, by the reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for item in items:
        first = {str(verdict.get("verdict")): verdict for verdict in render.items(item, "verdicts")[::-1]}
        word = next((word for word in ("unknown", "ok", "n/a") if word in first), "not judged")
        why = str(first[word].get("reason") or "") if word in first else str(item.get("problem") or "")
        groups.setdefault((word, "" if word == "ok" else why), []).append(str(item.get("rule")))
    order = ("unknown", "not judged", "n/a", "ok")
    lines: list[str] = []
    for (word, why), rules in sorted(groups.items(), key=lambda one: (-order.index(one[0][0]), one[0])):
        head = f"{render.plural(len(rules), 'rule')} {word}{f', {why}' if why else ''}: "
        lines += render.wrap_line(head + ", ".join(rules), limit, "  ")
    return lines


def _block(item: render.Json, settings: Settings, limit: int) -> list[str]:
    lines = render.wrap_line(f"{item.get('rule')}: {item.get('title')}", limit, "  ")
    facts = [
        f"{title} {_number(item[key])} s" if key.endswith("_s") else f"{title} {item[key]}"
        for title, key in (
            ("fires after", "for"), ("boot grace", "boot_grace_s"), ("clears after", "clear_after_s"),
            ("at most", "max_severity"), ("runbook", "runbook"),
        )
        if item.get(key)
    ]  # fmt: skip
    if item.get("enabled") is False:
        facts.append("disabled by the configuration")
    lines.extend(render.wrap_line("  " + "   ".join(facts), limit, "  "))
    if item.get("problem"):
        lines.extend(render.wrap_line(f"  not judged: {item['problem']}", limit, "    "))
    elif counts := _counts(item):
        lines.extend(
            render.wrap_line(f"  judged everywhere at {clock(item.get('run_at'))}: {counts}", limit, "    ")
        )
    limits = [
        [
            str(entry.get("name")),
            _number(entry.get("value")),
            str(entry.get("layer")),
            _scope(entry),
            str(entry.get("source")),
        ]
        for entry in render.items(item, "limits")
    ]
    if limits:
        head = [
            Column("LIMIT"),
            Column("VALUE", right=True),
            Column("LAYER"),
            Column("FOR"),
            Column("SET BY", fold=True),
        ]
        lines += ["", *render.table(head, limits, limit, "  ")]
    said = render.items(item, "verdicts")
    shown = [entry for entry in said if entry.get("verdict") not in ("ok", "n/a")] or said
    verdicts = [
        [
            render.state(entry.get("verdict"), settings.colored), str(entry.get("code") or ""),
            str(entry.get("place") or entry.get("entity")), _number(entry.get("observed")),
            _number(entry.get("expected")), str(entry.get("unit") or ""),
            render.age(entry.get("evidence_age_s")),
            str(entry.get("reason") or ""),
        ]
        for entry in shown
    ]  # fmt: skip
    if verdicts:
        head = [
            Column("VERDICT NOW"), Column("CODE"), Column("ON"), Column("OBSERVED", right=True),
            Column("EXPECTED", right=True), Column("UNIT"), Column("EVIDENCE", right=True),
            Column("REASON", fold=True),
        ]  # fmt: skip
        lines += ["", *render.table(head, verdicts, limit, "  ")]
    if len(shown) < len(said):
        lines += ["", f"  and {len(said) - len(shown)} here that are ok or not applicable"]
    lines.extend(_peers(item, limit))
    lines.extend(_details(item, limit))
    lines.extend(_findings(item, settings, limit))
    return lines


def _counts(item: render.Json) -> str:
    """What the rule said of everything that it judges: `62 ok, 2 crit`."""
    counts = item.get("last_run")
    if not isinstance(counts, dict):
        return ""
    words = {"na": "n/a"}
    return ", ".join(f"{count} {words.get(word, word)}" for word, count in counts.items() if count)


def _peers(item: render.Json, limit: int) -> list[str]:
    """What the rule measured on everything else: beside it a number says something."""
    parts = [
        f"{'this node' if peers.get('among') == 'node' else 'the fleet'}: {peers.get('entities')} from "
        f"{_number(peers.get('low'))} to {_number(peers.get('high'))}, median {_number(peers.get('middle'))} "
        f"{peers.get('unit') or ''}".rstrip()
        for peers in render.items(item, "peers")
    ]
    return ["", *render.wrap_line(f"  measured on {'; '.join(parts)}", limit, "    ")] if parts else []


def _details(item: render.Json, limit: int) -> list[str]:
    """What the rule itself adds to what is bad: its window, its samples, whom it compared with."""
    lines: list[str] = []
    for entry in render.items(item, "verdicts"):
        detail = entry.get("detail")
        if entry.get("verdict") not in ("warn", "crit") or not isinstance(detail, dict):
            continue
        facts = [f"{key} {render.brief(value)}" for key, value in detail.items() if value is not None]
        if facts:
            where = str(entry.get("place") or entry.get("entity"))
            lines += render.wrap_line(f"  {where}: {', '.join(facts)}", limit, "    ")
    return ["", *lines] if lines else []


def _findings(item: render.Json, settings: Settings, limit: int) -> list[str]:
    rows = [
        [
            f"{render.state(entry.get('verdict'), settings.colored)} {entry.get('state')}",
            str(entry.get("place") or entry.get("entity")), render.age(entry.get("age_s")),
            str(entry.get("incident_id") or "-"), _evidence(entry),
        ]
        for entry in render.items(item, "findings")
    ]  # fmt: skip
    if not rows:
        return []
    head = [
        Column("FINDING"),
        Column("ON"),
        Column("AGE", right=True),
        Column("INCIDENT"),
        Column("EVIDENCE (NEWEST FIRST)", fold=True),
    ]
    return ["", *render.table(head, rows, limit, "  ")]


def _evidence(entry: render.Json) -> str:
    evidence = entry.get("evidence")
    if not isinstance(evidence, list):
        return ""
    samples = [sample for sample in evidence if isinstance(sample, list) and len(sample) >= 2]
    return ", ".join(f"{clock(sample[0])} {sample[1]}" for sample in samples)


def _scope(entry: render.Json) -> str:
    parts = [str(entry[key]) for key in ("node", "model") if entry.get(key)]
    return " ".join(parts) or "all"


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) and not isinstance(value, bool) else "-"
