"""What the service counts, and its text for Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Seconds; the last bucket is all the rest.
LATENCY_BUCKETS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip

Sample = tuple[str, Mapping[str, str], float]
"""Suffix of the name, labels, value."""


class Histogram:
    """Counts of values by bucket."""

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BUCKETS) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(LATENCY_BUCKETS, value)] += 1
        self.total += value

    def samples(self, labels: Mapping[str, str]) -> Iterable[Sample]:
        """Yield the lines of Prometheus' histograms."""
        running = 0
        for bound, count in zip((*LATENCY_BUCKETS, "+Inf"), self.counts, strict=True):
            running += count
            yield "_bucket", {**labels, "le": str(bound)}, running
        yield "_sum", labels, self.total
        yield "_count", labels, running


class VersionMeasures:
    """What one policy version did."""

    def __init__(self) -> None:
        self.num_clusters = 0  # states that were decided for
        self.by_kind = {"place": 0, "wake": 0, "sleep": 0, "wait": 0}
        self.interventions: dict[str, int] = {}
        self.latency = Histogram()  # of a call, whatever its number of clusters
        self.policy_s = 0.0  # spent in the policy itself
        self.num_errors = 0
        self.num_compared = 0  # shadow only
        self.num_agreed = 0

    def observe(self, replies: Sequence[Any], elapsed_s: float, policy_s: float) -> None:
        """Count the replies to one call."""
        self.num_clusters += len(replies)
        self.latency.observe(elapsed_s)
        self.policy_s += policy_s
        by_kind = self.by_kind
        for reply in replies:
            for decision in reply.decisions:
                by_kind[decision.kind] += 1
            by_kind["wait"] += reply.ended_by == "wait"
            for note in reply.interventions:
                self.interventions[note.reason] = self.interventions.get(note.reason, 0) + 1


class Measures:
    """What all versions did, and how requests were answered."""

    def __init__(self) -> None:
        self.versions: dict[str, VersionMeasures] = {}
        self.responses: dict[tuple[str, int], int] = {}  # by path and status
        self.num_in_flight = 0

    def of(self, version: str) -> VersionMeasures:
        """Return the measures of a version."""
        if version not in self.versions:
            self.versions[version] = VersionMeasures()
        return self.versions[version]

    def respond(self, path: str, status: int) -> None:
        """Count one answer."""
        key = (path, status)
        self.responses[key] = self.responses.get(key, 0) + 1

    @staticmethod
    def text(replicas: Mapping[str, Measures], roles: Mapping[str, str]) -> str:
        """Return the measures of all replicas in the text format of Prometheus.

        Args:
            replicas: measures by replica.
            roles: version -> role, of those in use.
        """
        versions = [
            ({"replica": replica, "version": name}, version)
            for replica, measures in replicas.items()
            for name, version in measures.versions.items()
        ]
        lines: list[str] = []

        def family(name: str, kind: str, text: str, samples: Iterable[Sample]) -> None:
            lines.append(f"# HELP cloudsched_{name} {text}")
            lines.append(f"# TYPE cloudsched_{name} {kind}")
            lines.extend(
                f"cloudsched_{name}{suffix}{_labels(labels)} {value:.10g}"
                for suffix, labels, value in samples
            )

        family(
            "decisions_total",
            "counter",
            "Decisions by policy version and kind; wait ends a tick.",
            (
                ("", {**labels, "kind": kind}, count)
                for labels, version in versions
                for kind, count in version.by_kind.items()
            ),
        )
        family(
            "shield_interventions_total",
            "counter",
            "Times that the shield overruled the policy.",
            (
                ("", {**labels, "reason": reason}, count)
                for labels, version in versions
                for reason, count in version.interventions.items()
            ),
        )
        for name, text, attribute in (
            ("clusters_decided_total", "Cluster states decided for.", "num_clusters"),
            ("policy_seconds_total", "Seconds spent in the policy itself.", "policy_s"),
            ("policy_errors_total", "States that a shadow failed on.", "num_errors"),
            ("shadow_compared_total", "Replies that a shadow was compared with.", "num_compared"),
            ("shadow_agreed_total", "Replies that a shadow would have given too.", "num_agreed"),
        ):
            family(name, "counter", text, (("", lab, getattr(v, attribute)) for lab, v in versions))
        family(
            "decision_seconds",
            "histogram",
            "Time of a call in the service, whatever its number of clusters.",
            (sample for labels, version in versions for sample in version.latency.samples(labels)),
        )
        family(
            "responses_total",
            "counter",
            "Answers by path and status.",
            (
                ("", {"replica": replica, "path": path, "status": str(status)}, count)
                for replica, measures in replicas.items()
                for (path, status), count in measures.responses.items()
            ),
        )
        family(
            "requests_in_flight",
            "gauge",
            "Requests in hand: the queue of a replica.",
            (("", {"replica": name}, m.num_in_flight) for name, m in replicas.items()),
        )
        family(
            "policy_version_info",
            "gauge",
            "Versions in use, with their role.",
            (("", {"version": name, "role": role}, 1.0) for name, role in roles.items()),
        )
        return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    escaped = (
        f'{name}="{value}"'
        for name, value in (
            (n, v.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n"))
            for n, v in labels.items()
        )
    )
    return "{" + ",".join(escaped) + "}"
