// Drives a run with the types of openapi-typescript: creates it, follows its events, reads its text and its tokens.
import createClient from "openapi-fetch";
import type { components, paths } from "./schema.js";

type RunEvent = components["schemas"]["RunEvent"];

declare const process: { argv: string[] };

const client = createClient<paths, "application/json" | "application/problem+json">({ baseUrl: process.argv[2] });

function check(condition: unknown, why: string): asserts condition {
  if (!condition) throw new Error(why);
}

const created = await client.POST("/agents/{name}/runs", {
  params: { path: { name: "planner-scripted" }, header: { "Idempotency-Key": "typescript" } },
  body: { input: "Prepare the release", labels: { client: "typescript" } },
});
check(created.data, JSON.stringify(created.error));
const id = created.data.id;
check(created.response.headers.get("location") === `/runs/${id}`, "Location is the run's path");

// A union by `type`: each case has the fields of its event.
let finalText: string | undefined;
let calledAgents = 0;
for await (const event of follow(id)) {
  switch (event.type) {
    case "agent.called":
      check(event.child_agent.length > 0, "a child has an agent");
      calledAgents += 1;
      break;
    case "run.completed":
      if (event.run_id === id) finalText = event.content;
      break;
    case "run.failed":
      throw new Error(event.error.message);
  }
}
check(calledAgents >= 3, "the stream has the calls of agents");

const waited = await client.GET("/runs/{id}", { params: { path: { id }, query: { wait: "30" } } });
check(waited.data?.status === "completed", "the run is completed");
check(waited.data.content === finalText, "the event has the run's text");
check(waited.data.tree.input_tokens > waited.data.input_tokens, "the tree counts its children");

const page = await client.GET("/runs/{id}/events", { params: { path: { id }, query: { limit: 1000 } } });
check(page.data?.data[0]?.type === "run.queued", "the first event is run.queued");

const unknown = await client.GET("/agents/{name}", { params: { path: { name: "nobody" } } });
check(unknown.error?.code === "agent_not_found", "a problem has its code");
console.log(`openapi_clients: TypeScript: ${waited.data.tree.input_tokens} tokens in, ${finalText?.length} characters`);

async function* follow(id: string): AsyncGenerator<RunEvent> {
  const stream = await client.GET("/runs/{id}/events", {
    params: { path: { id } },
    headers: { accept: "text/event-stream" },
    parseAs: "stream",
  });
  check(stream.data, JSON.stringify(stream.error));
  let rest = "";
  const decoder = new TextDecoder();
  const reader = stream.data.getReader();
  for (let read = await reader.read(); !read.done; read = await reader.read()) {
    const lines = (rest + decoder.decode(read.value, { stream: true })).split("\n");
    rest = lines.pop() ?? "";
    for (const line of lines) {
      if (line.startsWith("data: ")) yield JSON.parse(line.slice("data: ".length)) as RunEvent;
    }
  }
}
