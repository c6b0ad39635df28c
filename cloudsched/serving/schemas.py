"""The wire: every document that the service takes and gives, as pydantic models.

They are the contract (OpenAPI is made from them) and the only definition: `cloudsched.serving.wire`
compiles fast parsers from them. Times are in ticks; a server's number is its place in the fleet.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_SERVERS = 10_000
MAX_JOBS = 100_000
MAX_BATCH = 4_096
MAX_EVENTS = 10_000
MAX_TICKS = 10**6

Name = Annotated[str, Field(min_length=1, max_length=253)]
Amount = Annotated[float, Field(ge=0.0, le=2.0**28)]
Demand = Annotated[list[Amount], Field(min_length=1, max_length=16)]
Ticks = Annotated[int, Field(ge=0, le=MAX_TICKS)]
Count = Annotated[int, Field(ge=0, le=2**31)]
Rate = Annotated[float, Field(ge=0.0, le=1e9)]
Watts = Annotated[float, Field(ge=0.0, le=1e9)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Document(BaseModel):
    """What all documents share: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ServerSpec(Document):
    """One server of a fleet."""

    capacity: Demand
    """Capacity in each resource; the first is the CPU, which drives power."""
    idle_w: Watts
    """Watts when idle."""
    max_w: Watts
    """Watts at full CPU load; more than `idle_w`."""
    exponent: Annotated[float, Field(ge=0.0, le=8.0)] = 1.0
    """Of the power curve `idle_w + (max_w - idle_w) * load ** exponent`; not 0 without a curve."""
    curve_w: Annotated[list[Watts], Field(min_length=11, max_length=11)] | None = None
    """Measured watts at 0, 10 ... 100 % load, instead of an exponent."""


class FleetSpec(Document):
    """A fleet that the service has not met before."""

    resources: Annotated[list[Name], Field(min_length=1, max_length=16)]
    """Names of the resources, the CPU first."""
    servers: Annotated[list[ServerSpec], Field(min_length=1, max_length=MAX_SERVERS)]


class Server(Document):
    """The state of one server."""

    mode: Literal["active", "waking", "asleep", "failed"] = "active"
    wake_left: Ticks = 0
    """Ticks until a waking server takes jobs."""
    idle_ticks: Ticks = 0
    """Ticks for which an active server has had no job."""


class RunningJob(Document):
    """A job that occupies a server."""

    server: Count
    demand: Demand
    ticks_left: Annotated[int, Field(ge=1, le=MAX_TICKS)]
    """Ticks until it is expected to end."""


class QueuedJob(Document):
    """A job that waits."""

    id: Name
    demand: Demand
    duration: Annotated[int, Field(ge=1, le=MAX_TICKS)]
    """Ticks that it is expected to run."""
    waited: Ticks = 0
    """Ticks since it arrived."""
    laxity: Annotated[int, Field(ge=-MAX_TICKS, le=MAX_TICKS)] | None = None
    """Ticks until the last start that is in time; what the SLA of the rules gives when absent."""


class ServerColumns(Document):
    """The states of all servers, one list for each field; entry n belongs to server n."""

    mode: Annotated[
        list[Literal["active", "waking", "asleep", "failed"]], Field(max_length=MAX_SERVERS)
    ] = []
    wake_left: Annotated[list[Ticks], Field(max_length=MAX_SERVERS)] = []
    """None: all 0."""
    idle_ticks: Annotated[list[Ticks], Field(max_length=MAX_SERVERS)] = []
    """None: all 0."""


class RunningColumns(Document):
    """Running jobs, one list for each field."""

    server: Annotated[list[Count], Field(max_length=MAX_JOBS)] = []
    demand: Annotated[list[Amount], Field(max_length=16 * MAX_JOBS)] = []
    """One job after another, a number for each resource."""
    ticks_left: Annotated[
        list[Annotated[int, Field(ge=1, le=MAX_TICKS)]], Field(max_length=MAX_JOBS)
    ] = []


class QueueColumns(Document):
    """Queued jobs in order of arrival, one list for each field."""

    id: Annotated[list[Name], Field(max_length=MAX_JOBS)] = []
    demand: Annotated[list[Amount], Field(max_length=16 * MAX_JOBS)] = []
    """One job after another, a number for each resource."""
    duration: Annotated[
        list[Annotated[int, Field(ge=1, le=MAX_TICKS)]], Field(max_length=MAX_JOBS)
    ] = []
    waited: Annotated[list[Ticks], Field(max_length=MAX_JOBS)] = []
    """None: all 0."""
    laxity: Annotated[
        list[Annotated[int, Field(ge=-MAX_TICKS, le=MAX_TICKS)]], Field(max_length=MAX_JOBS)
    ] = []
    """None: what the SLA of the rules gives."""


class SlaWindow(Document):
    """What happened to a cluster's jobs of late, for the shield."""

    arrived: Count = 0
    violations: Count = 0
    is_tripped: bool = False
    """Whether the safe rule has been deciding; it goes on until the SLA is met again."""


class DecisionRequest(Document):
    """The state of one cluster, for which the decisions of this tick are wanted."""

    cluster: Annotated[str, Field(max_length=253)] = ""
    """Name of the cluster: chooses its policy version when a canary runs, and marks the log."""
    fleet: Annotated[str, Field(max_length=253)] | FleetSpec = "default"
    """A fleet, or the name of a registered one: `default`, or a cluster's id."""
    servers: Annotated[list[Server], Field(max_length=MAX_SERVERS)] | ServerColumns = []
    """One for each server of the fleet; all of them active and idle when empty. Columns are read
    several times as fast as rows; so with jobs."""
    running: Annotated[list[RunningJob], Field(max_length=MAX_JOBS)] | RunningColumns = []
    queue: Annotated[list[QueuedJob], Field(max_length=MAX_JOBS)] | QueueColumns = []
    """In order of arrival."""
    time_of_day_s: Annotated[float, Field(ge=0.0, le=1e12)] = 0.0
    """Now, in seconds after midnight (any number of days may be added)."""
    decisions_in_tick: Count = 0
    """Decisions that were already taken in this tick."""
    arrival_rates: Annotated[list[Rate], Field(min_length=3, max_length=3)] | None = None
    """Jobs arriving a tick, averaged over the last 5, 30 and 200 ticks."""
    work_rates: Annotated[list[Rate], Field(min_length=3, max_length=3)] | None = None
    """CPU x ticks of the arriving jobs, a tick, over the same."""
    work_square: Annotated[float, Field(ge=0.0, le=1e18)] = 0.0
    """Mean square of the CPU x ticks arriving a tick, over the last 200 ticks."""
    last_server: Annotated[int, Field(ge=-1, le=MAX_SERVERS)] = -1
    """As the last reply gave it; only round robin reads it."""
    sla_window: SlaWindow = SlaWindow()
    max_decisions: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Stop after so many decisions; the rules' limit when absent."""
    alternatives: Annotated[int, Field(ge=0, le=16)] = 3
    """How many other actions to name beside each decision."""


class Alternative(Document):
    """An action that was legal and not taken."""

    kind: Literal["place", "wake", "sleep", "wait"]
    job: str | None
    server: int | None
    probability: float


class Decision(Document):
    """One command, to be carried out after those before it."""

    kind: Literal["place", "wake", "sleep"]
    job: str | None
    """Which job to place."""
    server: int
    probability: float
    """What the policy gave this action; 1 for rules, which do not weigh."""
    alternatives: list[Alternative]


class Intervention(Document):
    """Where the shield overruled the policy, and why."""

    reason: Literal["sla_cap", "policy_error", "policy_nonsense", "policy_timeout", "suspended"]
    detail: str


class DecisionReply(Document):
    """The decisions of a tick, in order."""

    cluster: str
    policy: str
    """Version that decided."""
    decisions: list[Decision]
    ended_by: Literal["wait", "limit"]
    """`wait`: the policy wants nothing more in this tick; `limit`: there were enough."""
    wait_probability: float
    last_server: int
    interventions: list[Intervention]


class BatchRequest(Document):
    """The states of many clusters."""

    requests: Annotated[list[DecisionRequest], Field(min_length=1, max_length=MAX_BATCH)]


class BatchReply(Document):
    """The replies, in the order of the requests."""

    replies: list[DecisionReply]


class ClusterRequest(Document):
    """A cluster whose state the service shall keep."""

    id: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9._-]+$")]
    fleet: Annotated[str, Field(max_length=253)] | FleetSpec = "default"
    time_of_day_s: Annotated[float, Field(ge=0.0, le=86_400.0)] = 0.0
    """At tick 0."""


class Arrival(Document):
    """A job has come."""

    kind: Literal["arrival"]
    id: Name
    job: Name
    demand: Demand
    duration: Annotated[int, Field(ge=1, le=MAX_TICKS)]


class Completion(Document):
    """A running job has ended."""

    kind: Literal["completion"]
    id: Name
    job: Name


class ServerFailure(Document):
    """A server is down; its jobs go back into the queue, as if they had not started."""

    kind: Literal["server_failed"]
    id: Name
    server: Count


class ServerRecovery(Document):
    """A failed server is up again, awake and empty."""

    kind: Literal["server_recovered"]
    id: Name
    server: Count


class Tick(Document):
    """A tick has passed. What follows in the same call happened when the new tick began."""

    kind: Literal["tick"]
    id: Name


Event = Annotated[
    Arrival | Completion | ServerFailure | ServerRecovery | Tick, Field(discriminator="kind")
]


class EventsRequest(Document):
    """What happened, in order. Events whose id the cluster has seen are skipped."""

    events: Annotated[list[Event], Field(min_length=1, max_length=MAX_EVENTS)]
    expect_version: Count | None = None
    """Refuse unless the cluster's state has this version: for callers who must not overtake."""
    alternatives: Annotated[int, Field(ge=0, le=16)] = 0


class EventsReply(Document):
    """What the events did, and the decisions that they caused."""

    cluster: str
    version: int
    """Of the cluster's state, after this call."""
    tick: int
    applied: list[str]
    """Ids of the events that this call applied."""
    repeated: list[str]
    """Ids that the cluster had seen before; they changed nothing."""
    rejected: list[str]
    """Jobs that were refused: they fit on no server, or the queue is full."""
    requeued: list[str]
    """Jobs that lost their server and wait again."""
    policy: str
    decisions: list[Decision]
    interventions: list[Intervention]


class ClusterView(Document):
    """The state of a cluster that the service keeps."""

    id: str
    version: int
    tick: int
    time_of_day_s: float
    resources: list[str]
    servers: list[Server]
    running: dict[str, int]
    """Job -> server."""
    queue: list[str]
    is_shielded: bool
    """Whether the safe rule decides until the SLA is met again."""
    counters: dict[str, float]
    """arrived, started, completed, rejected, violations, dropped, energy_kwh, ... since tick 0."""


class PolicyView(Document):
    """A version that is loaded."""

    name: str
    role: Literal["active", "canary", "shadow"]
    source: str
    """Name of a rule, or folder of a bundle."""
    weights_sha256: str | None
    share: float
    """Share of clusters that it decides for."""
    training: dict[str, object]
    evaluation: dict[str, object] | None


class PoliciesView(Document):
    """All versions that are loaded, with what they did so far in this replica."""

    policies: list[PolicyView]
    encoder_version: int
    fallback: str


class PolicyRequest(Document):
    """A version to load."""

    source: Annotated[str, Field(min_length=1, max_length=4096)]
    """Name of a rule (`cloudsched policies`), or folder of a bundle that all replicas can read."""
    role: Literal["active", "canary", "shadow"] = "active"
    share: Share = 0.0
    """canary: share of clusters that it decides for."""
    name: Annotated[str, Field(max_length=253)] = ""
    """What to call it; made from the source when empty."""


class Problem(Document):
    """Why a call was refused."""

    error: str
    """One sentence: what is wrong, the value, the fix."""
