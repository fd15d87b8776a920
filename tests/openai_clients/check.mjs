// Drives a daemon with OpenAI's official client for Node: node check.mjs <address> <key>
import assert from "node:assert/strict";
import OpenAI from "openai";

const [address, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${address}/v1`, apiKey });
const hello = [{ role: "user", content: "hello" }];
const tools = [
  {
    type: "function",
    function: { name: "weather", parameters: { type: "object", properties: { city: { type: "string" } } } },
  },
];

const checks = {
  async models() {
    const ids = (await client.models.list()).data.map((model) => model.id);
    assert.deepEqual(ids, ["caller", "chat", "sorter", "suite"]);
  },
  async completion() {
    const got = await client.chat.completions.create({ model: "chat", messages: hello });
    assert.equal(got.choices[0].message.content, "You said: hello");
    assert.equal(got.usage.total_tokens, 17);
  },
  async stream() {
    const stream = await client.chat.completions.create({ model: "chat", messages: hello, stream: true });
    let text = "";
    for await (const chunk of stream) text += chunk.choices[0]?.delta.content ?? "";
    assert.equal(text, "You said: hello");
  },
  async tools() {
    const runner = client.chat.completions.runTools({
      model: "caller",
      messages: [{ role: "user", content: "How is it?" }],
      tools: [{ ...tools[0], function: { ...tools[0].function, parse: JSON.parse, function: () => "rain" } }],
    });
    assert.equal(await runner.finalContent(), "The weather: rain");
  },
  async responses() {
    const first = await client.responses.create({ model: "chat", input: "hello" });
    assert.equal(first.output_text, "You said: hello");
    const stream = await client.responses.create({
      model: "chat",
      input: "again",
      previous_response_id: first.id,
      stream: true,
    });
    let text = "";
    for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
    assert.equal(text, "You said: again");
  },
  async resumedStream() {
    const created = await client.responses.create({ model: "chat", input: "hi", background: true, stream: true });
    let id, last;
    for await (const event of created) {
      if (event.type === "response.created") id = event.response.id;
      if (event.type === "response.output_text.delta") {
        last = event.sequence_number;
        break;
      }
    }
    const rest = await client.responses.retrieve(id, { stream: true, starting_after: last });
    const types = [];
    let text;
    for await (const event of rest) {
      types.push(event.type);
      if (event.type === "response.completed") text = event.response.output[0].content[0].text;
    }
    assert.equal(text, "You said: hi");
    assert.ok(!types.includes("response.created"), types.join());
    const final = await client.responses.stream({ response_id: id }).finalResponse();
    assert.equal(final.output_text, "You said: hi");
  },
  async errors() {
    await assert.rejects(client.chat.completions.create({ model: "nobody", messages: hello }), (error) => {
      assert.ok(error instanceof OpenAI.NotFoundError);
      assert.equal(error.code, "agent_not_found");
      return true;
    });
    const stranger = new OpenAI({ baseURL: `${address}/v1`, apiKey: "wrong" });
    await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(`node: ${name}`);
}
