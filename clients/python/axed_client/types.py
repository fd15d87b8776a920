"""What the daemon sends, as its OpenAPI document describes it. Later versions may add fields and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict, Union

from typing_extensions import NotRequired

RunStatus = Literal["queued", "running", "waiting", "cancelling", "completed", "failed", "cancelled"]
MessageContent = Union[str, "list[dict[str, Any]]"]


class RunError(TypedDict):
    code: str
    message: str
    category: str
    retryable: bool


class Warning(TypedDict):
    code: str
    message: str
    turn: int | None


class PendingApproval(TypedDict):
    run_id: str
    root_id: str
    agent: str
    tool_call_id: str
    tool: str
    arguments: Any
    truncated: NotRequired[bool]
    arguments_hash: str
    requested_at: str
    deadline: str | None


class PendingQuestion(TypedDict):
    id: str
    run_id: str
    root_id: str
    agent: str
    call_id: str
    question: str
    schema: dict[str, Any] | None
    options: list[str]
    server: NotRequired[str]
    tool: NotRequired[str]
    arguments: NotRequired[Any]
    truncated: NotRequired[bool]
    began_at: NotRequired[str]
    since: str
    until: str | None


CallOutcome = Literal["done", "not_done", "unknown"]


class BegunCall(TypedDict):
    tool: str
    arguments: Any
    truncated: NotRequired[bool]
    began_at: str


class Wait(TypedDict):
    reason: str
    since: str
    until: NotRequired[str]
    event: NotRequired[str]
    key: NotRequired[str]
    call_id: NotRequired[str]
    tool: NotRequired[str]
    arguments: NotRequired[Any]
    truncated: NotRequired[bool]
    began_at: NotRequired[str]


class Usage(TypedDict):
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    model_calls: int
    tool_calls: int
    cost_usd: float | None
    complete: bool


class Reused(TypedDict):
    runs: int
    turns: int


class TreeUsage(Usage):
    runs: int
    reused: NotRequired[Reused]


class ForkedFrom(TypedDict):
    run: str
    at_run: str
    turn: int


class RunLinks(TypedDict):
    self: str
    events: str
    cancel: str
    tree: str


class Run(TypedDict):
    id: str
    agent: str
    agent_version: str
    variant: Literal["current", "candidate"] | None
    status: RunStatus
    parent_id: str | None
    root_id: str
    depth: int
    tool_call_id: str | None
    input: MessageContent
    content: str | None
    partial_content: str | None
    structured: Any
    model: str
    stop_reason: str | None
    turns: int
    input_tokens: int
    output_tokens: int
    tool_calls: int
    duration_ms: int
    tree: TreeUsage
    session: str | None
    forked_from: ForkedFrom | None
    waiting_for: str | None
    wait: Wait | None
    suspended: str | None
    pending_approvals: list[PendingApproval]
    pending_inputs: list[PendingQuestion]
    warnings: list[Warning]
    error: RunError | None
    cancel_reason: str | None
    label: str | None
    completion_status: str | None
    labels: dict[str, str]
    scores: dict[str, ScoreSummary]
    attempt: int
    created_at: str
    started_at: str | None
    finished_at: str | None
    last_event: int
    links: RunLinks
    truncated: NotRequired[bool]


class ChildRun(Run):
    task: str | None
    usage: Usage


class ReusedRun(TypedDict):
    id: str
    agent: str
    tool_call_id: str


class RunTree(TypedDict):
    id: str
    agent: str
    status: RunStatus
    depth: int
    label: str | None
    tool_call_id: str | None
    task: str | None
    truncated: NotRequired[bool]
    model: str
    turns: int
    usage: Usage
    duration_ms: int
    error: RunError | None
    reused: NotRequired[list[ReusedRun]]
    children: list[RunTree]


class ScoreSummary(TypedDict):
    n: int
    mean: NotRequired[float]
    counts: NotRequired[dict[str, int]]


class Score(TypedDict):
    run_id: str
    name: str
    value: float | str
    author: str | None
    comment: str | None
    turn: int | None
    created_at: str


class FeedbackLink(TypedDict):
    url: str
    expires_at: str


EvalState = Literal["queued", "running", "completed", "stopped", "cancelled", "failed"]


class EvalVersion(TypedDict):
    agent: str
    version: str


class Summary(TypedDict):
    n: int
    mean: float | None


class Comparison(TypedDict):
    """A difference is new - old."""

    n: int
    difference: float | None
    low: float | None
    high: float | None
    p: float | None
    wins: int
    losses: int
    ties: int
    needed: int | None


class ScorerResult(Comparison):
    """New version first."""

    versions: list[Summary]
    labels: NotRequired[dict[str, list[int]]]
    errors: NotRequired[dict[str, int]]


class DurationSummary(TypedDict):
    p50: int | None
    p95: int | None


class VersionTotals(TypedDict):
    cases: int
    cost: float | None
    tokens: float
    turns: float
    tool_calls: float
    duration: DurationSummary
    errors: dict[str, int]
    diverged: int


class FlippedCase(TypedDict):
    case: str
    scorers: list[str]
    a: str
    b: str
    compare: str


class GateOutcome(TypedDict):
    gate: str
    held: bool
    actual: float | None
    why: str


class EvalResult(VersionTotals):
    scorers: dict[str, ScorerResult]
    against: VersionTotals | None
    flipped: list[FlippedCase]
    gates: list[GateOutcome]


class EvalLinks(TypedDict):
    self: str
    cases: str
    cancel: str


class Eval(TypedDict):
    id: str
    agent: str
    state: EvalState
    versions: list[EvalVersion]
    against_eval: str | None
    dataset: str | None
    since: str | None
    scorers: list[str]
    tools: str
    unknown: str
    ignore: list[str]
    repeat: int
    gates: list[str]
    planned: int
    ended: int
    estimate_usd: float | None
    cap_usd: float | None
    spent_usd: float
    created_at: str
    finished_at: str | None
    reason: str | None
    result: EvalResult | None
    links: EvalLinks


class Divergence(TypedDict):
    path: str
    turn: int
    tool: str
    arguments: str


class EvalRun(TypedDict):
    version: int
    repeat: int
    run_id: str | None
    outcome: str | None
    error: str | None
    scores: dict[str, float | str]
    unscored: dict[str, str]
    cost_usd: float | None
    tokens: int | None
    turns: int | None
    tool_calls: int | None
    duration_ms: int | None
    diverged: Divergence | None


class EvalCase(TypedDict):
    case: str
    expected: Any
    run: str | None
    runs: list[EvalRun]


class AddedMessage(TypedDict):
    run_id: str
    number: int


class AgentSummary(TypedDict):
    name: str
    version: str | None
    valid: bool
    error: str | None
    warnings: list[str]
    description: str | None
    model: Any
    sub_agents: list[str]
    tools: list[str]


class Turn(TypedDict):
    turn: int
    provider: str
    model: str
    effort: str | None
    status: str
    copied: bool
    redacted: bool
    request_bytes: int | None
    first_token_ms: int | None
    duration_ms: int
    attempts: list[dict[str, Any]]
    usage: dict[str, int] | None
    cost_usd: float | None
    stop_reason: str | None
    tool_calls: int


class TurnDetail(Turn):
    request: dict[str, Any] | None
    reply: dict[str, Any] | None


class ForkPoint(TypedDict, total=False):
    run: str
    turn: int
    after: Literal["reply"]


class Budget(TypedDict, total=False):
    max_tokens: int
    max_cost_usd: float
    max_tool_calls: int
    max_runs: int


class Webhook(TypedDict, total=False):
    url: str
    events: list[str]


class RunFields(TypedDict, total=False):
    """The fields of a new run's request, besides its input and its time limit."""

    context: str
    model: str
    skill: str
    workdir: str
    params: dict[str, Any]
    budget: Budget
    labels: dict[str, str]
    response_format: dict[str, Any]
    stream: bool
    webhook: Webhook
    session: str
    on_busy: Literal["queue", "reject", "cancel_previous"]
    priority: Literal["interactive", "background"]
    messages: list[dict[str, Any]]


class RunRequest(RunFields, total=False):
    timeout: int


class ForkEdit(TypedDict, total=False):
    message: MessageContent
    tool_results: dict[str, str]
    model: str
    effort: str
    params: dict[str, Any]
    max_turns: int
    system: str
    reply: dict[str, Any]


class ForkRequest(TypedDict, total=False):
    at: ForkPoint
    edit: ForkEdit
    definition: Literal["recorded", "current"]
    labels: dict[str, str]
    webhook: Webhook
    budget: Budget
    timeout: int
    session: str
    memory: bool


class EvalRequest(TypedDict, total=False):
    """What `create_eval` sends. The new version is `agent` or `definition`, the cases are `dataset` or `cases`."""

    agent: str
    definition: str
    dataset: str
    cases: list[dict[str, Any]]
    against: str | dict[str, str]
    scorers: list[str]
    tools: str
    repeat: int
    budget: float
    gates: list[str]


class RunFilters(TypedDict, total=False):
    """What `runs` lists; `labels={"team": "blue"}` lists runs with this label."""

    agent: str
    status: RunStatus
    root: str
    all: bool
    session: str
    since: str
    until: str
    full: bool
    limit: int
    labels: Mapping[str, str]
