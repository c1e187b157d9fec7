"""The report as plain values, ready for JSON: the plan's own record, and what is computed from it."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlplace.placement.memory.ledger_text import ledger_record
from rlplace.placement.show.record import problem_record, render_json
from rlplace.placement.show.report import Comparison, PlanReport
from rlplace.placement.transfers import Traffic


def report_record(report: PlanReport) -> dict[str, Any]:
    """The same report gives the same dict, key order included."""
    return {
        "config": report.name,
        "fits": report.fits,
        **render_json(report.plan),
        "savings": None if report.comparison is None else _savings(report.comparison),
        "counts": [dataclasses.asdict(count) for count in report.counts],
        "traffic": _traffic(report.traffic),
        "memory": ledger_record(report.ledger),
        "shortages": [problem_record(p) for p in report.shortages],
    }


def _savings(comparison: Comparison) -> dict[str, Any]:
    return {
        "used": comparison.savings.used,
        "dedicated": comparison.savings.dedicated,
        "saved": comparison.savings.saved,
        "by_component": dict(comparison.savings.by_component),
        "at_work": dict(comparison.here.at_work),
        "dedicated_at_work": dict(comparison.apart.at_work),
        "fullest_bytes": comparison.here_bytes,
        "dedicated_fullest_bytes": comparison.apart_bytes,
    }


def _traffic(traffic: Traffic) -> dict[str, Any]:
    return {
        "to_host_bytes": traffic.to_host_bytes,
        "from_host_bytes": traffic.from_host_bytes,
        "weights_bytes": {transport.value: size for transport, size in traffic.weights_bytes.items()},
    }
