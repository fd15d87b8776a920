// The events of a run. `event.type` says which one it is, and the compiler then knows its other fields.

import type { BegunCall, Comparison, ForkedFrom, Reused, RunError } from "./types.js";

interface AnyEvent {
  run_id: string;
  root_id: string;
  depth: number;
  agent: string;
  time: string;
}

interface RecordedEvent extends AnyEvent {
  seq: number;
}

/** Sent in streams alone; without a number. */
interface LiveEvent extends AnyEvent {
  seq?: undefined;
}

export interface CalledTool {
  id: string;
  name: string;
}

export interface RunQueuedEvent extends RecordedEvent {
  type: "run.queued";
  parent_id?: string;
  tool_call_id?: string;
  request?: Record<string, unknown>;
}

export interface RunForkedEvent extends RecordedEvent {
  type: "run.forked";
  forked_from: ForkedFrom;
  turns: number;
  reused: Reused;
  edited: string[];
}

export interface RunStartedEvent extends RecordedEvent {
  type: "run.started";
  model: string;
  agent_version: string;
}

export interface RunResumedEvent extends RecordedEvent {
  type: "run.resumed";
  attempt: number;
  cause: "restart" | "request";
  by?: string;
}

export interface RunPausedEvent extends RecordedEvent {
  type: "run.paused";
  by?: string;
}

export interface RunCancellingEvent extends RecordedEvent {
  type: "run.cancelling";
  reason: string;
}

export interface RunCompletedEvent extends RecordedEvent {
  type: "run.completed";
  turns: number;
  characters: number;
  content: string;
  truncated?: boolean;
}

export interface RunFailedEvent extends RecordedEvent {
  type: "run.failed";
  error: RunError;
}

export interface RunCancelledEvent extends RecordedEvent {
  type: "run.cancelled";
  reason: string;
}

export interface TurnStartedEvent extends RecordedEvent {
  type: "turn.started";
  turn: number;
  messages: number;
  results: number;
}

export interface TurnCompletedEvent extends RecordedEvent {
  type: "turn.completed";
  turn: number;
  model: string;
  stop_reason: string | null;
  input_tokens: number;
  output_tokens: number;
  cache_read_tokens: number;
  cache_write_tokens: number;
  reasoning_tokens?: number;
  tool_calls: CalledTool[];
}

export interface ToolStartedEvent extends RecordedEvent {
  type: "tool.started";
  turn: number;
  tool_call_id: string;
  tool: string;
  arguments: unknown;
  truncated?: boolean;
}

export interface ToolCompletedEvent extends RecordedEvent {
  type: "tool.completed";
  turn: number;
  tool_call_id: string;
  tool: string;
  duration_ms: number;
  is_error: boolean;
  result: string;
  truncated?: boolean;
}

export interface AgentCalledEvent extends RecordedEvent {
  type: "agent.called";
  tool_call_id: string;
  child_id: string;
  child_agent: string;
  child_depth: number;
  task: string;
  background?: boolean;
}

export interface AgentReturnedEvent extends RecordedEvent {
  type: "agent.returned";
  tool_call_id: string;
  child_id: string;
  child_agent: string;
  duration_ms: number;
  characters?: number;
  error?: string;
  input_tokens: number;
  output_tokens: number;
  tool_calls: number;
  awaited_by?: string;
  message?: number;
}

export interface ApprovalRequestedEvent extends RecordedEvent {
  type: "approval.requested";
  turn: number;
  tool_call_id: string;
  tool: string;
  arguments: unknown;
  arguments_hash: string;
  truncated?: boolean;
  deadline?: string;
}

export interface ApprovalDecidedEvent extends RecordedEvent {
  type: "approval.decided";
  tool_call_id: string;
  decision: "approved" | "denied" | "timed_out";
  arguments?: unknown;
  truncated?: boolean;
  reason?: string;
  by?: string;
}

export interface InputRequestedEvent extends RecordedEvent {
  type: "input.requested";
  turn: number;
  input_id: string;
  tool_call_id: string;
  question: string;
  schema?: unknown;
  options?: string[];
  server?: string;
  begun?: BegunCall;
  deadline?: string;
}

export interface InputAnsweredEvent extends RecordedEvent {
  type: "input.answered";
  input_id: string;
  outcome: "answered" | "declined" | "timed_out";
  answer?: unknown;
  reason?: string;
  by?: string;
}

export interface WaitStartedEvent extends RecordedEvent {
  type: "wait.started";
  turn: number;
  tool_call_id: string;
  event?: string;
  key?: string;
  until?: string;
}

export interface WaitEndedEvent extends RecordedEvent {
  type: "wait.ended";
  tool_call_id: string;
  data?: unknown;
}

export interface MessageAddedEvent extends RecordedEvent {
  type: "message.added";
  number: number;
  content: string;
  truncated?: boolean;
  by?: string;
}

export interface RetryScheduledEvent extends RecordedEvent {
  type: "retry.scheduled";
  turn: number;
  model: string;
  attempt: number;
  wait_ms: number;
  reason: string;
}

export interface TurnDelayedEvent extends RecordedEvent {
  type: "turn.delayed";
  turn: number;
  reason: "rate_limit";
  until: string | null;
}

export interface BatchSubmittedEvent extends RecordedEvent {
  type: "batch.submitted";
  turn: number;
  model: string;
  batch_id: string;
}

export interface MemoryWarningEvent extends RecordedEvent {
  type: "memory.warning";
  message: string;
}

export interface ToolsWarningEvent extends RecordedEvent {
  type: "tools.warning";
  message: string;
}

export interface LoopWarningEvent extends RecordedEvent {
  type: "loop.warning";
  turn: number;
  repeats: number;
  message: string;
}

export interface ModelWarningEvent extends RecordedEvent {
  type: "model.warning";
  turn: number;
  message: string;
}

export interface ContextCompactedEvent extends RecordedEvent {
  type: "context.compacted";
  turn: number;
  strategy: "compact" | "drop_tool_results" | "fail";
  from_turn: number;
  to_turn: number;
  messages: number;
  results: number;
  tokens_before: number;
  tokens_after: number;
  model?: string;
  input_tokens: number;
  output_tokens: number;
}

export interface BudgetAlertEvent extends RecordedEvent {
  type: "budget.alert";
  budget: string;
  share: number;
  resets_at: string;
}

export interface ScoreAddedEvent extends RecordedEvent {
  type: "score.added";
  name: string;
  value: number | string;
  author?: string;
  comment?: string;
  turn?: number;
  replaced: boolean;
}

export interface ScoreFailedEvent extends RecordedEvent {
  type: "score.failed";
  name: string;
  message: string;
}

export interface RolloutStoppedEvent extends RecordedEvent {
  type: "rollout.stopped";
  candidate: string;
  current: string;
  loss: {
    scorer: string | null;
    difference: number;
    low: number;
    high: number;
    max_loss: number;
    candidate_runs: number;
    current_runs: number;
  };
}

export interface EvalRegressedEvent extends RecordedEvent {
  type: "eval.regressed";
  eval: string;
  against: string;
  scorers: Record<string, Comparison>;
}

export interface ReasoningStartedEvent extends LiveEvent {
  type: "reasoning.started";
  turn: number;
}

export interface ReasoningDeltaEvent extends LiveEvent {
  type: "reasoning.delta";
  turn: number;
  text: string;
}

export interface TextDeltaEvent extends LiveEvent {
  type: "text.delta";
  turn: number;
  text: string;
}

export interface TextWithdrawnEvent extends LiveEvent {
  type: "text.withdrawn";
  turn: number;
  reason: string;
}

export type RunEvent =
  | RunQueuedEvent
  | RunForkedEvent
  | RunStartedEvent
  | RunResumedEvent
  | RunPausedEvent
  | RunCancellingEvent
  | RunCompletedEvent
  | RunFailedEvent
  | RunCancelledEvent
  | TurnStartedEvent
  | TurnCompletedEvent
  | ToolStartedEvent
  | ToolCompletedEvent
  | AgentCalledEvent
  | AgentReturnedEvent
  | ApprovalRequestedEvent
  | ApprovalDecidedEvent
  | InputRequestedEvent
  | InputAnsweredEvent
  | WaitStartedEvent
  | WaitEndedEvent
  | MessageAddedEvent
  | RetryScheduledEvent
  | TurnDelayedEvent
  | BatchSubmittedEvent
  | MemoryWarningEvent
  | ToolsWarningEvent
  | LoopWarningEvent
  | ModelWarningEvent
  | ContextCompactedEvent
  | BudgetAlertEvent
  | ScoreAddedEvent
  | ScoreFailedEvent
  | RolloutStoppedEvent
  | EvalRegressedEvent
  | ReasoningStartedEvent
  | ReasoningDeltaEvent
  | TextDeltaEvent
  | TextWithdrawnEvent;
