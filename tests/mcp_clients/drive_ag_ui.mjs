// The official AG-UI client holds a chat with agents and answers an interrupt.
import assert from "node:assert/strict";
import { HttpAgent } from "@ag-ui/client";

const [server] = process.argv.slice(2);

const chat = new HttpAgent({ url: `${server}/agents/test_tool_with_progress/ag-ui`, threadId: "chat-1" });
chat.addMessage({ id: "u1", role: "user", content: "go" });
const calls = [];
await chat.runAgent({}, { onToolCallEndEvent: ({ toolCallName }) => calls.push(toolCallName) });
assert.deepEqual(calls, ["call_agent"]);
const roles = chat.messages.map((message) => message.role);
assert.deepEqual(roles, ["user", "assistant", "tool", "assistant"]);
assert.equal(chat.messages.at(-1).content, "Done: This is a simple text response for testing.");

const careful = new HttpAgent({ url: `${server}/agents/careful/ag-ui`, threadId: "chat-2" });
careful.addMessage({ id: "u1", role: "user", content: "write" });
let outcome;
const keep = { onRunFinishedEvent: ({ event }) => (outcome = event.outcome) };
await careful.runAgent({}, keep);
assert.equal(outcome.type, "interrupt");
const resume = outcome.interrupts.map(({ id }) => ({
  interruptId: id,
  status: "resolved",
  payload: { decision: "approve" },
}));
await careful.runAgent({ resume }, keep);
assert.equal(outcome.type, "success");
assert.match(careful.messages.at(-1).content, /^Done: /);

const failing = new HttpAgent({ url: `${server}/agents/test_error_handling/ag-ui`, threadId: "chat-3" });
failing.addMessage({ id: "u1", role: "user", content: "go" });
let error;
await failing.runAgent({}, { onRunErrorEvent: ({ event }) => (error = event) }).catch(() => {});
assert.equal(error.code, "provider_bad_request");
console.log("mcp_clients: the AG-UI client works");
