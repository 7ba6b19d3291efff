// OpenAI's Node SDK on a tour of every endpoint of a running server.
// Arguments: URL MODEL KIND, as for the Python programs. Whatever is not as it should be throws.

import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const messages = [{ role: "user", content: "Say something." }];
const schema = {
  type: "object",
  properties: { answer: { enum: ["yes", "no"] } },
  required: ["answer"],
  additionalProperties: false,
};
const tools = [
  {
    type: "function",
    function: { name: "look", description: "Look there", parameters: { ...schema, properties: { answer: { enum: ["here"] } } } },
  },
];

async function step(label, work) {
  const start = performance.now();
  let error = null;
  try {
    await work();
  } catch (raised) {
    error = String(raised.stack ?? raised).slice(0, 1500);
  }
  console.log(JSON.stringify({ step: label, error, seconds: (performance.now() - start) / 1000 }));
}

await step("models", async () => {
  const names = [];
  for await (const each of client.models.list()) names.push(each.id);
  assert.deepEqual(names, [model]);
  assert.equal((await client.models.retrieve(model)).id, model);
});

await step("chat", async () => {
  const answer = await client.chat.completions.create({ model, messages, max_completion_tokens: 8, n: 2, seed: 1, logprobs: true });
  assert.equal(answer.choices.length, 2);
  assert.equal(answer.choices[0].logprobs.content.length, answer.usage.completion_tokens / 2);
  assert.equal(answer.object, "chat.completion");
});

await step("chat, streamed", async () => {
  const request = { model, messages, max_completion_tokens: 8, temperature: 0 };
  const whole = await client.chat.completions.create(request);
  const stream = await client.chat.completions.create({ ...request, stream: true, stream_options: { include_usage: true } });
  let text = "";
  let usage = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.deepEqual(usage.completion_tokens, whole.usage.completion_tokens);
  // The SDK's helper wants an answer that was not cut.
  const runner = client.chat.completions.stream({ model, messages, temperature: 0, stop: ["a", "e", "i", "o"] });
  assert.doesNotMatch(await runner.finalContent(), /[aeio]/);
});

await step("chat, structured", async () => {
  const answer = await client.chat.completions.parse({
    model,
    messages,
    response_format: { type: "json_schema", json_schema: { name: "answer", schema, strict: true } },
  });
  assert.ok(["yes", "no"].includes(JSON.parse(answer.choices[0].message.content).answer));
});

await step("chat, a tool", async () => {
  const request = { model, messages, tools, tool_choice: { type: "function", function: { name: "look" } } };
  const answer = await client.chat.completions.create(request);
  assert.equal(answer.choices[0].finish_reason, "tool_calls");
  const [call] = answer.choices[0].message.tool_calls;
  assert.deepEqual([call.function.name, JSON.parse(call.function.arguments)], ["look", { answer: "here" }]);
  const runner = client.chat.completions.stream(request);
  assert.deepEqual(JSON.parse((await runner.finalMessage()).tool_calls[0].function.arguments), { answer: "here" });
});

await step("completions", async () => {
  const request = { model, prompt: ["Once", "Then"], max_tokens: 4, echo: true, temperature: 0 };
  const whole = await client.completions.create(request);
  assert.deepEqual(whole.choices.map((choice) => choice.text.slice(0, 4)), ["Once", "Then"]);
  const texts = ["", ""];
  for await (const chunk of await client.completions.create({ ...request, stream: true })) {
    for (const choice of chunk.choices) texts[choice.index] += choice.text;
  }
  assert.deepEqual(texts, whole.choices.map((choice) => choice.text));
});

await step("embeddings", async () => {
  const input = ["one", "two", "one"];
  const packed = await client.embeddings.create({ model, input });
  const plain = await client.embeddings.create({ model, input, encoding_format: "float" });
  assert.deepEqual(packed.data.map((each) => each.embedding), plain.data.map((each) => each.embedding.map(Math.fround)));
  assert.deepEqual(packed.data[0].embedding, packed.data[2].embedding);
  assert.ok(Math.abs(plain.data[1].embedding.reduce((sum, each) => sum + each * each, 0) - 1) < 1e-5);
});

await step("responses", async () => {
  const first = await client.responses.create({ model, input: "Say something.", instructions: "Be brief.", max_output_tokens: 8 });
  assert.ok(["completed", "incomplete"].includes(first.status));
  assert.equal(first.output_text, first.output[0].content[0].text);
  const stream = await client.responses.create({
    model,
    input: "And more?",
    previous_response_id: first.id,
    max_output_tokens: 8,
    stream: true,
  });
  let text = "";
  let last = null;
  let number = 0;
  for await (const event of stream) {
    assert.equal(event.sequence_number, number++);
    if (event.type === "response.output_text.delta") text += event.delta;
    last = event;
  }
  assert.ok(["response.completed", "response.incomplete"].includes(last.type));
  assert.equal(last.response.output_text ?? last.response.output[0].content[0].text, text);
  const kept = await client.responses.retrieve(last.response.id);
  assert.deepEqual(kept.output, last.response.output);
  assert.equal(kept.previous_response_id, first.id);
  const items = [];
  for await (const item of client.responses.inputItems.list(kept.id)) items.push(item);
  assert.equal(items[0].content[0].text, "And more?");
  await client.responses.delete(kept.id);
  await assert.rejects(client.responses.retrieve(kept.id), OpenAI.NotFoundError);
});

await step("responses, a tool", async () => {
  const [tool] = tools.map(({ function: { name, parameters } }) => ({ type: "function", name, parameters, strict: true }));
  const runner = client.responses.stream({
    model,
    input: "Look!",
    tools: [tool],
    tool_choice: { type: "function", name: "look" },
    store: false,
  });
  const answer = await runner.finalResponse();
  assert.deepEqual(answer.output.map((item) => item.type), ["function_call"]);
  assert.deepEqual(JSON.parse(answer.output[0].arguments), { answer: "here" });
  await assert.rejects(client.responses.retrieve(answer.id), OpenAI.NotFoundError);
});

await step("the rest", async () => {
  assert.deepEqual(await client.get(`${url}/health`), { status: "ok" });
  const { tokens } = await client.post(`${url}/tokenize`, { body: { prompt: "one two", add_special_tokens: false } });
  assert.equal((await client.post(`${url}/detokenize`, { body: { tokens } })).prompt, "one two");
  assert.equal((await client.get(`${url}/openapi.json`)).openapi, "3.1.0");
  await assert.rejects(client.post("/requests/nobody/cancel"), OpenAI.NotFoundError);
});

await step("errors", async () => {
  await assert.rejects(client.chat.completions.create({ model: "other", messages }), OpenAI.NotFoundError);
  await assert.rejects(
    client.chat.completions.create({ model, messages, temperature: -1 }),
    (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
  );
});
