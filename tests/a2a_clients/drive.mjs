// The official A2A SDK calls agents: cards, messages, streams, approvals, lists, cancellation, push notifications, errors.
import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer } from "node:http";
import { ListTasksRequest, SendMessageRequest, TaskPushNotificationConfig, TaskState } from "@a2a-js/sdk";
import { ClientFactory, ClientFactoryOptions } from "@a2a-js/sdk/client";

const [server, binding] = process.argv.slice(2);
const preferred = { preferredTransports: [binding] };
const factory = new ClientFactory(ClientFactoryOptions.createFrom(ClientFactoryOptions.default, preferred));
const clientOf = (agent) => factory.createFromUrl(`${server}/a2a/${agent}/.well-known/agent-card.json`, "");
let messages = 0;
const message = (text, more = {}, configuration = undefined) =>
  SendMessageRequest.fromJSON({
    message: { messageId: `m${++messages}`, role: "ROLE_USER", parts: [{ text }], ...more },
    configuration,
  });
const textOf = (artifact) => artifact.parts.map((part) => part.content.value).join("");

const slow = await clientOf("slow");
const card = await slow.getAgentCard();
assert.equal(card.name, "slow");
assert.ok(card.supportedInterfaces.some((it) => it.protocolBinding === binding));
assert.equal(card.capabilities.pushNotifications, true);

const task = await slow.sendMessage(message("count"));
assert.equal(task.status.state, TaskState.TASK_STATE_COMPLETED);
assert.equal(textOf(task.artifacts[0]), "one two three");
assert.equal(task.history.length, 2);
const found = await slow.getTask({ id: task.id, tenant: "" });
assert.equal(found.contextId, task.contextId);
console.log(`a2a_clients: ${binding}: the SDK sends messages and reads tasks`);

let text = "";
let last;
for await (const { payload } of slow.sendMessageStream(message("count", { contextId: task.contextId }))) {
  if (payload.$case === "artifactUpdate") {
    text = payload.value.append ? text + textOf(payload.value.artifact) : textOf(payload.value.artifact);
  }
  last = payload;
}
assert.equal(last.$case, "statusUpdate");
assert.equal(last.value.status.state, TaskState.TASK_STATE_COMPLETED);
assert.equal(text, "one two three");
console.log(`a2a_clients: ${binding}: the SDK follows a stream`);

const careful = await clientOf("careful");
const waiting = await careful.sendMessage(message("write"));
assert.equal(waiting.status.state, TaskState.TASK_STATE_INPUT_REQUIRED);
const written = await careful.sendMessage(message("approve", { taskId: waiting.id, contextId: waiting.contextId }));
assert.equal(written.id, waiting.id);
assert.equal(written.status.state, TaskState.TASK_STATE_COMPLETED);
console.log(`a2a_clients: ${binding}: the SDK answers an approval`);

const page = await slow.listTasks(ListTasksRequest.fromJSON({ pageSize: 1, includeArtifacts: true }));
assert.equal(page.totalSize, 2);
assert.equal(page.tasks.length, 1);
const rest = await slow.listTasks(ListTasksRequest.fromJSON({ pageSize: 1, pageToken: page.nextPageToken }));
assert.deepEqual([rest.tasks[0].id, rest.nextPageToken], [task.id, ""]);

const background = await careful.sendMessage(message("write", {}, { returnImmediately: true }));
const cancelled = await careful.cancelTask({ id: background.id, tenant: "", metadata: undefined });
assert.equal(cancelled.status.state, TaskState.TASK_STATE_CANCELED);
await assert.rejects(careful.cancelTask({ id: background.id, tenant: "", metadata: undefined }), { name: "TaskNotCancelableError" });
await assert.rejects(slow.getTask({ id: background.id, tenant: "" }), { name: "TaskNotFoundError" });
console.log(`a2a_clients: ${binding}: the SDK lists and cancels tasks, and knows the errors`);

const received = [];
const receiver = createServer((request, response) => {
  let body = "";
  request.on("data", (chunk) => (body += chunk));
  request.on("end", () => {
    received.push({ token: request.headers["x-a2a-notification-token"], body: JSON.parse(body) });
    response.end();
    receiver.emit("received");
  });
});
receiver.listen(0, "127.0.0.1");
await once(receiver, "listening");
const url = `http://127.0.0.1:${receiver.address().port}/hook`;
const notified = await slow.sendMessage(message("count", {}, { returnImmediately: true }));
const config = await slow.createTaskPushNotificationConfig(
  TaskPushNotificationConfig.fromJSON({ taskId: notified.id, url, token: "t0ken" }),
);
const configs = await slow.listTaskPushNotificationConfig({ taskId: notified.id, tenant: "", pageSize: 0, pageToken: "" });
assert.deepEqual(configs.configs.map(({ id }) => id), [config.id]);
const isEnd = ({ body }) => body.statusUpdate.status.state === "TASK_STATE_COMPLETED";
while (!received.some(isEnd)) await once(receiver, "received");
assert.equal(received.find(isEnd).token, "t0ken");
assert.equal(received.find(isEnd).body.statusUpdate.taskId, notified.id);
await slow.deleteTaskPushNotificationConfig({ taskId: notified.id, id: config.id, tenant: "" });
receiver.close();
receiver.closeAllConnections();
console.log(`a2a_clients: ${binding}: the SDK gets push notifications`);
