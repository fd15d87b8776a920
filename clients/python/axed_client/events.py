"""The events of a run. `event["type"]` says which one it is, and type checkers then know its other fields."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Union

from typing_extensions import NotRequired

from axed_client.types import BegunCall, Comparison, ForkedFrom, Reused, RunError


class _Event(TypedDict):
    run_id: str
    root_id: str
    depth: int
    agent: str
    time: str


class _RecordedEvent(_Event):
    seq: int


class _LiveEvent(_Event):
    """Sent in streams alone; without a number."""

    seq: NotRequired[int]


class CalledTool(TypedDict):
    id: str
    name: str


class RunQueuedEvent(_RecordedEvent):
    type: Literal["run.queued"]
    parent_id: NotRequired[str]
    tool_call_id: NotRequired[str]
    request: NotRequired[dict[str, Any]]


class RunForkedEvent(_RecordedEvent):
    type: Literal["run.forked"]
    forked_from: ForkedFrom
    turns: int
    reused: Reused
    edited: list[str]


class RunStartedEvent(_RecordedEvent):
    type: Literal["run.started"]
    model: str
    agent_version: str


class RunResumedEvent(_RecordedEvent):
    type: Literal["run.resumed"]
    attempt: int
    cause: Literal["restart", "request"]
    by: NotRequired[str]


class RunPausedEvent(_RecordedEvent):
    type: Literal["run.paused"]
    by: NotRequired[str]


class RunCancellingEvent(_RecordedEvent):
    type: Literal["run.cancelling"]
    reason: str


class RunCompletedEvent(_RecordedEvent):
    type: Literal["run.completed"]
    turns: int
    characters: int
    content: str
    truncated: NotRequired[bool]


class RunFailedEvent(_RecordedEvent):
    type: Literal["run.failed"]
    error: RunError


class RunCancelledEvent(_RecordedEvent):
    type: Literal["run.cancelled"]
    reason: str


class TurnStartedEvent(_RecordedEvent):
    type: Literal["turn.started"]
    turn: int
    messages: int
    results: int


class TurnCompletedEvent(_RecordedEvent):
    type: Literal["turn.completed"]
    turn: int
    model: str
    stop_reason: str | None
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    reasoning_tokens: NotRequired[int]
    tool_calls: list[CalledTool]


class ToolStartedEvent(_RecordedEvent):
    type: Literal["tool.started"]
    turn: int
    tool_call_id: str
    tool: str
    arguments: Any
    truncated: NotRequired[bool]


class ToolCompletedEvent(_RecordedEvent):
    type: Literal["tool.completed"]
    turn: int
    tool_call_id: str
    tool: str
    duration_ms: int
    is_error: bool
    result: str
    truncated: NotRequired[bool]


class AgentCalledEvent(_RecordedEvent):
    type: Literal["agent.called"]
    tool_call_id: str
    child_id: str
    child_agent: str
    child_depth: int
    task: str
    background: NotRequired[bool]


class AgentReturnedEvent(_RecordedEvent):
    type: Literal["agent.returned"]
    tool_call_id: str
    child_id: str
    child_agent: str
    duration_ms: int
    characters: NotRequired[int]
    error: NotRequired[str]
    input_tokens: int
    output_tokens: int
    tool_calls: int
    awaited_by: NotRequired[str]
    message: NotRequired[int]


class ApprovalRequestedEvent(_RecordedEvent):
    type: Literal["approval.requested"]
    turn: int
    tool_call_id: str
    tool: str
    arguments: Any
    arguments_hash: str
    truncated: NotRequired[bool]
    deadline: NotRequired[str]


class ApprovalDecidedEvent(_RecordedEvent):
    type: Literal["approval.decided"]
    tool_call_id: str
    decision: Literal["approved", "denied", "timed_out"]
    arguments: NotRequired[Any]
    truncated: NotRequired[bool]
    reason: NotRequired[str]
    by: NotRequired[str]


class InputRequestedEvent(_RecordedEvent):
    type: Literal["input.requested"]
    turn: int
    input_id: str
    tool_call_id: str
    question: str
    schema: NotRequired[Any]
    options: NotRequired[list[str]]
    server: NotRequired[str]
    begun: NotRequired[BegunCall]
    deadline: NotRequired[str]


class InputAnsweredEvent(_RecordedEvent):
    type: Literal["input.answered"]
    input_id: str
    outcome: Literal["answered", "declined", "timed_out"]
    answer: NotRequired[Any]
    reason: NotRequired[str]
    by: NotRequired[str]


class WaitStartedEvent(_RecordedEvent):
    type: Literal["wait.started"]
    turn: int
    tool_call_id: str
    event: NotRequired[str]
    key: NotRequired[str]
    until: NotRequired[str]


class WaitEndedEvent(_RecordedEvent):
    type: Literal["wait.ended"]
    tool_call_id: str
    data: NotRequired[Any]


class MessageAddedEvent(_RecordedEvent):
    type: Literal["message.added"]
    number: int
    content: str
    truncated: NotRequired[bool]
    by: NotRequired[str]


class RetryScheduledEvent(_RecordedEvent):
    type: Literal["retry.scheduled"]
    turn: int
    model: str
    attempt: int
    wait_ms: int
    reason: str


class TurnDelayedEvent(_RecordedEvent):
    type: Literal["turn.delayed"]
    turn: int
    reason: Literal["rate_limit"]
    until: str | None


class BatchSubmittedEvent(_RecordedEvent):
    type: Literal["batch.submitted"]
    turn: int
    model: str
    batch_id: str


class MemoryWarningEvent(_RecordedEvent):
    type: Literal["memory.warning"]
    message: str


class ToolsWarningEvent(_RecordedEvent):
    type: Literal["tools.warning"]
    message: str


class LoopWarningEvent(_RecordedEvent):
    type: Literal["loop.warning"]
    turn: int
    repeats: int
    message: str


class ModelWarningEvent(_RecordedEvent):
    type: Literal["model.warning"]
    turn: int
    message: str


class ContextCompactedEvent(_RecordedEvent):
    type: Literal["context.compacted"]
    turn: int
    strategy: Literal["compact", "drop_tool_results", "fail"]
    from_turn: int
    to_turn: int
    messages: int
    results: int
    tokens_before: int
    tokens_after: int
    model: NotRequired[str]
    input_tokens: int
    output_tokens: int


class BudgetAlertEvent(_RecordedEvent):
    type: Literal["budget.alert"]
    budget: str
    share: float
    resets_at: str


class ScoreAddedEvent(_RecordedEvent):
    type: Literal["score.added"]
    name: str
    value: float | str
    author: NotRequired[str]
    comment: NotRequired[str]
    turn: NotRequired[int]
    replaced: bool


class RolloutLoss(TypedDict):
    scorer: str | None
    difference: float
    low: float
    high: float
    max_loss: float
    candidate_runs: int
    current_runs: int


class ScoreFailedEvent(_RecordedEvent):
    type: Literal["score.failed"]
    name: str
    message: str


class RolloutStoppedEvent(_RecordedEvent):
    type: Literal["rollout.stopped"]
    candidate: str
    current: str
    loss: RolloutLoss


class EvalRegressedEvent(_RecordedEvent):
    type: Literal["eval.regressed"]
    eval: str
    against: str
    scorers: dict[str, Comparison]


class ReasoningStartedEvent(_LiveEvent):
    type: Literal["reasoning.started"]
    turn: int


class ReasoningDeltaEvent(_LiveEvent):
    type: Literal["reasoning.delta"]
    turn: int
    text: str


class TextDeltaEvent(_LiveEvent):
    type: Literal["text.delta"]
    turn: int
    text: str


class TextWithdrawnEvent(_LiveEvent):
    type: Literal["text.withdrawn"]
    turn: int
    reason: str


RunEvent = Union[
    RunQueuedEvent,
    RunForkedEvent,
    RunStartedEvent,
    RunResumedEvent,
    RunPausedEvent,
    RunCancellingEvent,
    RunCompletedEvent,
    RunFailedEvent,
    RunCancelledEvent,
    TurnStartedEvent,
    TurnCompletedEvent,
    ToolStartedEvent,
    ToolCompletedEvent,
    AgentCalledEvent,
    AgentReturnedEvent,
    ApprovalRequestedEvent,
    ApprovalDecidedEvent,
    InputRequestedEvent,
    InputAnsweredEvent,
    WaitStartedEvent,
    WaitEndedEvent,
    MessageAddedEvent,
    RetryScheduledEvent,
    TurnDelayedEvent,
    BatchSubmittedEvent,
    MemoryWarningEvent,
    ToolsWarningEvent,
    LoopWarningEvent,
    ModelWarningEvent,
    ContextCompactedEvent,
    BudgetAlertEvent,
    ScoreAddedEvent,
    ScoreFailedEvent,
    RolloutStoppedEvent,
    EvalRegressedEvent,
    ReasoningStartedEvent,
    ReasoningDeltaEvent,
    TextDeltaEvent,
    TextWithdrawnEvent,
]
