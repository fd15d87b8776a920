// What the daemon sends, as its OpenAPI document describes it. Later versions may add fields and values.

export type RunStatus = "queued" | "running" | "waiting" | "cancelling" | "completed" | "failed" | "cancelled";

export type MessageContent = string | Record<string, unknown>[];

/** An object is for an agent with an `input_schema`. */
export type RunInput = MessageContent | Record<string, unknown>;

export interface RunError {
  code: string;
  message: string;
  category: string;
  retryable: boolean;
}

export interface Warning {
  code: string;
  message: string;
  turn: number | null;
}

export interface PendingQuestion {
  id: string;
  run_id: string;
  root_id: string;
  agent: string;
  call_id: string;
  question: string;
  schema: Record<string, unknown> | null;
  options: string[];
  server?: string;
  tool?: string;
  arguments?: unknown;
  truncated?: boolean;
  began_at?: string;
  since: string;
  until: string | null;
}

export type CallOutcome = "done" | "not_done" | "unknown";

export interface BegunCall {
  tool: string;
  arguments: unknown;
  truncated?: boolean;
  began_at: string;
}

export interface Wait {
  reason: string;
  since: string;
  until?: string;
  event?: string;
  key?: string;
  call_id?: string;
  tool?: string;
  arguments?: unknown;
  truncated?: boolean;
  began_at?: string;
}

export interface PendingApproval {
  run_id: string;
  root_id: string;
  agent: string;
  tool_call_id: string;
  tool: string;
  arguments: unknown;
  truncated?: boolean;
  arguments_hash: string;
  requested_at: string;
  deadline: string | null;
}

export interface Usage {
  input_tokens: number;
  output_tokens: number;
  cache_read_tokens: number;
  cache_write_tokens: number;
  model_calls: number;
  tool_calls: number;
  cost_usd: number | null;
  complete: boolean;
}

export interface Reused {
  runs: number;
  turns: number;
}

export interface TreeUsage extends Usage {
  runs: number;
  reused?: Reused;
}

export interface ForkedFrom {
  run: string;
  at_run: string;
  turn: number;
}

export interface RunLinks {
  self: string;
  events: string;
  cancel: string;
  tree: string;
}

export interface Run {
  id: string;
  agent: string;
  agent_version: string;
  variant: "current" | "candidate" | null;
  status: RunStatus;
  parent_id: string | null;
  root_id: string;
  depth: number;
  tool_call_id: string | null;
  input: MessageContent;
  content: string | null;
  partial_content: string | null;
  structured: unknown;
  model: string;
  stop_reason: string | null;
  turns: number;
  input_tokens: number;
  output_tokens: number;
  tool_calls: number;
  duration_ms: number;
  tree: TreeUsage;
  session: string | null;
  forked_from: ForkedFrom | null;
  waiting_for: string | null;
  wait: Wait | null;
  suspended: string | null;
  pending_approvals: PendingApproval[];
  pending_inputs: PendingQuestion[];
  warnings: Warning[];
  error: RunError | null;
  cancel_reason: string | null;
  label: string | null;
  completion_status: string | null;
  labels: Record<string, string>;
  scores: Record<string, ScoreSummary>;
  attempt: number;
  created_at: string;
  started_at: string | null;
  finished_at: string | null;
  last_event: number;
  links: RunLinks;
  truncated?: boolean;
}

export interface ScoreSummary {
  n: number;
  mean?: number;
  counts?: Record<string, number>;
}

export interface Score {
  run_id: string;
  name: string;
  value: number | string;
  author: string | null;
  comment: string | null;
  turn: number | null;
  created_at: string;
}

export interface FeedbackLink {
  url: string;
  expires_at: string;
}

export interface EvalVersion {
  agent: string;
  version: string;
}

export interface Summary {
  n: number;
  mean: number | null;
}

/** A difference is new - old. */
export interface Comparison {
  n: number;
  difference: number | null;
  low: number | null;
  high: number | null;
  p: number | null;
  wins: number;
  losses: number;
  ties: number;
  needed: number | null;
}

/** New version first. */
export interface ScorerResult extends Comparison {
  versions: Summary[];
  labels?: Record<string, number[]>;
  errors?: Record<string, number>;
}

export interface DurationSummary {
  p50: number | null;
  p95: number | null;
}

export interface VersionTotals {
  cases: number;
  cost: number | null;
  tokens: number;
  turns: number;
  tool_calls: number;
  duration: DurationSummary;
  errors: Record<string, number>;
  diverged: number;
}

export interface FlippedCase {
  case: string;
  scorers: string[];
  a: string;
  b: string;
  compare: string;
}

export interface GateOutcome {
  gate: string;
  held: boolean;
  actual: number | null;
  why: string;
}

export interface EvalResult extends VersionTotals {
  scorers: Record<string, ScorerResult>;
  against: VersionTotals | null;
  flipped: FlippedCase[];
  gates: GateOutcome[];
}

export interface EvalLinks {
  self: string;
  cases: string;
  cancel: string;
}

export interface Eval {
  id: string;
  agent: string;
  state: "queued" | "running" | "completed" | "stopped" | "cancelled" | "failed";
  versions: EvalVersion[];
  against_eval: string | null;
  dataset: string | null;
  since: string | null;
  scorers: string[];
  tools: string;
  unknown: string;
  ignore: string[];
  repeat: number;
  gates: string[];
  planned: number;
  ended: number;
  estimate_usd: number | null;
  cap_usd: number | null;
  spent_usd: number;
  created_at: string;
  finished_at: string | null;
  reason: string | null;
  result: EvalResult | null;
  links: EvalLinks;
}

export interface Divergence {
  path: string;
  turn: number;
  tool: string;
  arguments: string;
}

export interface EvalRun {
  version: number;
  repeat: number;
  run_id: string | null;
  outcome: string | null;
  error: string | null;
  scores: Record<string, number | string>;
  unscored: Record<string, string>;
  cost_usd: number | null;
  tokens: number | null;
  turns: number | null;
  tool_calls: number | null;
  duration_ms: number | null;
  diverged: Divergence | null;
}

export interface EvalCase {
  case: string;
  expected: unknown;
  run: string | null;
  runs: EvalRun[];
}

export interface ChildRun extends Run {
  task: string | null;
  usage: Usage;
}

export interface ReusedRun {
  id: string;
  agent: string;
  tool_call_id: string;
}

export interface RunTree {
  id: string;
  agent: string;
  status: RunStatus;
  depth: number;
  label: string | null;
  tool_call_id: string | null;
  task: string | null;
  truncated?: boolean;
  model: string;
  turns: number;
  usage: Usage;
  duration_ms: number;
  error: RunError | null;
  reused?: ReusedRun[];
  children: RunTree[];
}

export interface AddedMessage {
  run_id: string;
  number: number;
}

export interface AgentSummary {
  name: string;
  version: string | null;
  valid: boolean;
  error: string | null;
  warnings: string[];
  description: string | null;
  model: unknown;
  sub_agents: string[];
  tools: string[];
}

export interface Turn {
  turn: number;
  provider: string;
  model: string;
  effort: string | null;
  status: string;
  copied: boolean;
  redacted: boolean;
  request_bytes: number | null;
  first_token_ms: number | null;
  duration_ms: number;
  attempts: Record<string, unknown>[];
  usage: Record<string, number> | null;
  cost_usd: number | null;
  stop_reason: string | null;
  tool_calls: number;
}

export interface TurnDetail extends Turn {
  request: Record<string, unknown> | null;
  reply: Record<string, unknown> | null;
}

export interface ForkPoint {
  run?: string;
  turn?: number;
  after?: "reply";
}

/** The fields of a new run's request. */
export interface RunRequest {
  input?: RunInput;
  context?: string;
  model?: string;
  skill?: string;
  workdir?: string;
  params?: Record<string, unknown>;
  timeout?: number;
  budget?: Record<string, number>;
  labels?: Record<string, string>;
  response_format?: Record<string, unknown>;
  stream?: boolean;
  webhook?: Record<string, unknown>;
  session?: string;
  on_busy?: "queue" | "reject" | "cancel_previous";
  priority?: "interactive" | "background";
  messages?: Record<string, unknown>[];
}

/** The new version is `agent` or `definition`, the cases are `dataset` or `cases`. */
export interface EvalRequest {
  agent?: string;
  definition?: string;
  dataset?: string;
  cases?: Record<string, unknown>[];
  against?: string | { definition: string };
  scorers?: string[];
  tools?: string;
  repeat?: number;
  budget?: number;
  gates?: string[];
}

export interface ForkEdit {
  message?: MessageContent;
  tool_results?: Record<string, string>;
  model?: string;
  effort?: string;
  params?: Record<string, unknown>;
  max_turns?: number;
  system?: string;
  reply?: Record<string, unknown>;
}

export interface ForkRequest {
  at?: ForkPoint;
  edit?: ForkEdit;
  definition?: "recorded" | "current";
  labels?: Record<string, string>;
  webhook?: Record<string, unknown>;
  budget?: Record<string, number>;
  timeout?: number;
  session?: string;
  memory?: boolean;
}
