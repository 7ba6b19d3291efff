// Vercel's AI SDK on a tour of a running server: text, streams, tools, objects, embeddings, errors.
// Arguments: URL MODEL KIND, as for the Python programs. Whatever is not as it should be throws.

import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embedMany, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const [url, name, kind] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "xserv",
  baseURL: `${url}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider(name);
const prompt = "What is 17 plus 25?";
const said = kind === "scripted" ? "Hello." : "42";
const asked = { model, prompt, temperature: 0, maxRetries: 0, maxOutputTokens: 200 };
const weather = tool({
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
  execute: async () => "sunny",
});
const verdict = z.object({ isRight: z.boolean() });
const isReal = kind !== "scripted";

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

await step("chat", async () => {
  const answer = await generateText(asked);
  assert.equal(answer.text, said);
  assert.equal(answer.finishReason, "stop");
  assert.ok(answer.usage.outputTokens > 0);
});

await step("stream", async () => {
  const result = streamText(asked);
  let text = "";
  for await (const piece of result.textStream) text += piece;
  assert.equal(text, said);
  assert.ok((await result.usage).outputTokens > 0);
});

await step("an answer sent back", async () => {
  const first = await generateText(asked);
  const user = { role: "user", content: prompt };
  const { prompt: _, ...rest } = asked;
  assert.ok((await generateText({ ...rest, messages: [user, ...first.response.messages, user] })).text);
});

if (isReal) {
  await step("forced tool", async () => {
    for (const toolChoice of ["required", { type: "tool", toolName: "weather" }]) {
      const answer = await generateText({ ...asked, tools: { weather }, toolChoice });
      assert.equal(answer.toolCalls[0].toolName, "weather");
      assert.equal(answer.toolResults[0].output, "sunny");
    }
  });

  await step("object", async () => {
    assert.equal(typeof (await generateObject({ ...asked, schema: verdict })).object.isRight, "boolean");
    const result = streamObject({ ...asked, schema: verdict });
    for await (const part of result.partialObjectStream) assert.ok(part);
    assert.equal(typeof (await result.object).isRight, "boolean");
  });

  await step("embeddings", async () => {
    const { embeddings } = await embedMany({ model: provider.textEmbeddingModel(name), values: ["one", "two"] });
    assert.equal(embeddings.length, 2);
    assert.equal(embeddings[0].length, embeddings[1].length);
  });

  await step("completion", async () => {
    const request = { model: provider.completionModel(name), prompt: "Once", maxOutputTokens: 4, temperature: 0 };
    const whole = await generateText(request);
    let text = "";
    for await (const piece of streamText(request).textStream) text += piece;
    assert.equal(text, whole.text);
  });

  await step("a closed stream", async () => {
    const count = async () => {
      const lines = (await (await fetch(`${url}/metrics`)).text()).split("\n");
      const line = lines.find((each) => each.startsWith("vllm:request_success_total{") && each.includes('"abort"'));
      return Number(line.split(" ").at(-1));
    };
    const before = await count();
    const controller = new AbortController();
    const result = streamText({
      ...asked,
      maxOutputTokens: 1500,
      providerOptions: { xserv: { ignore_eos: true } },
      abortSignal: controller.signal,
    });
    for await (const piece of result.textStream) {
      assert.ok(piece);
      controller.abort();
    }
    for (let tries = 0; (await count()) <= before; tries += 1) {
      assert.ok(tries < 1000, "the server did not notice that the stream was closed");
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
  });
} else {
  await step("tool round trip", async () => {
    const request = { ...asked, prompt: "How is Paris?", tools: { weather }, stopWhen: stepCountIs(3) };
    const answer = await generateText(request);
    assert.equal(answer.steps.length, 2);
    assert.deepEqual(answer.steps[0].toolCalls[0].input, { city: "Paris" });
    assert.equal(answer.text, "It is sunny in Paris.");
    let text = "";
    for await (const piece of streamText(request).textStream) text += piece;
    assert.equal(text, "It is sunny in Paris.");
  });
}

await step("overflow", async () => {
  const error = await generateText({ ...asked, prompt: prompt.repeat(4000) }).then(() => null, (raised) => raised);
  assert.ok(APICallError.isInstance(error), String(error));
  assert.equal(error.statusCode, 400);
  assert.match(error.message, /maximum context length/);
});
