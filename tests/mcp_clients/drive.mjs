// The official TypeScript client drives agents over HTTP and over stdio, with the protocol of today and with that of 2025.
import assert from "node:assert/strict";
import { Client, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";
import { StdioClientTransport } from "@modelcontextprotocol/client/stdio";

const [axed, server] = process.argv.slice(2);
const http = () => new StreamableHTTPClientTransport(new URL(`${server}/mcp`));
const stdio = () => new StdioClientTransport({ command: axed, args: ["mcp", "--server", server] });

async function connect(transport, mode, capabilities = {}) {
  const client = new Client({ name: "story", version: "1" }, { versionNegotiation: { mode }, capabilities });
  return { client, connected: () => client.connect(transport) };
}

async function calls(transport, mode) {
  const { client, connected } = await connect(transport, mode);
  await connected();
  const { tools } = await client.listTools();
  assert.ok(tools.some((tool) => tool.name === "slow" && tool.description === "Takes three seconds."));
  const progress = [];
  const result = await client.callTool(
    { name: "test_tool_with_progress", arguments: { input: "go" } },
    { onprogress: (it) => progress.push(it.progress) },
  );
  assert.equal(result.content[0].text, "Done: This is a simple text response for testing.");
  assert.ok(progress.length >= 3, JSON.stringify(progress));
  const uri = `axed://runs/${result._meta["axed/run_id"]}`;
  const { contents } = await client.readResource({ uri });
  assert.equal(JSON.parse(contents[0].text).status, "completed");

  // An aborted call cancels its run.
  const abort = new AbortController();
  let run;
  const aborted = client.callTool(
    { name: "slow", arguments: { input: "abort" } },
    {
      signal: abort.signal,
      onprogress: async () => abort.abort("no longer wanted"),
    },
  );
  await assert.rejects(aborted);
  for (;;) {
    const { data } = await (await fetch(`${server}/runs?agent=slow&limit=1`)).json();
    run = data[0];
    if (!["queued", "running", "cancelling"].includes(run.status)) break;
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
  assert.equal(run.status, "cancelled");
  await client.close();
}

async function approval(transport) {
  const { client, connected } = await connect(transport, "auto", { elicitation: { form: {} } });
  client.setRequestHandler("elicitation/create", async () => ({ action: "decline" }));
  await connected();
  const result = await client.callTool({ name: "careful", arguments: { input: "write" } });
  assert.match(result.content[0].text, /was denied: declined by the client's user/);
  await client.close();
}

for (const transport of [http, stdio]) {
  await calls(transport(), "auto");
  await calls(transport(), "legacy");
  await approval(transport());
}
console.log("mcp_clients: the TypeScript client works over HTTP and stdio");
