"""What the calls of plugins add up to: pure."""

from collections.abc import Iterable, Sequence

from rollout_api.records import PluginCall, PluginReport, PluginsRecord, Record


def calls_of(records: Iterable[Record]) -> list[PluginCall]:
    return [call for record in records if isinstance(record, PluginsRecord) for call in record.calls]


def reports_of(calls: Sequence[PluginCall]) -> dict[str, PluginReport]:
    """A report for each plugin, by name; scores and analyses are put in by whoever has them."""
    reports = {}
    for name in dict.fromkeys(call.plugin for call in calls):
        own = [call for call in calls if call.plugin == name]
        failures = [call for call in own if call.did == "Failed"]
        reports[name] = PluginReport(
            calls=len(own),
            seconds=round(sum(call.seconds for call in own), 6),
            refused=sum(call.did == "Refused" for call in own),
            changed=sum(call.did == "Changed" for call in own),
            failed=len(failures),
            error=f"{failures[0].hook}: {failures[0].message}" if failures else None,
        )
    return reports
