// OpenAI's Node SDK sends pictures to a running server that reads them, by data URI and by URL, whole and streamed.
// Arguments: URL MODEL ASKED, the last {"pictures": {way: URI}, "question", "answer", "numTokens"} as JSON.

import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, model, asked] = process.argv.slice(2);
const { pictures, question, answer, numTokens } = JSON.parse(asked);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 60_000 });

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

const text = { type: "text", text: question };
const chat = (...parts) => ({ model, temperature: 0, messages: [{ role: "user", content: [...parts, text] }] });
const input = (...parts) => ({
  model,
  temperature: 0,
  input: [{ role: "user", content: [...parts, { type: "input_text", text: question }] }],
});

for (const [way, picture] of Object.entries(pictures)) {
  const part = { type: "image_url", image_url: { url: picture, detail: "auto" } };
  const inputPart = { type: "input_image", image_url: picture, detail: "high" };

  await step(`chat by ${way}`, async () => {
    const whole = await client.chat.completions.create(chat(part));
    assert.equal(whole.choices[0].message.content, answer);
    assert.equal(whole.choices[0].finish_reason, "stop");
    assert.ok(whole.usage.prompt_tokens > numTokens);
    const without = await client.chat.completions.create(chat());
    assert.equal(whole.usage.prompt_tokens - without.usage.prompt_tokens, numTokens + 2);
    assert.notEqual(without.choices[0].message.content, answer);
  });

  await step(`chat by ${way}, streamed`, async () => {
    let said = "";
    for await (const chunk of await client.chat.completions.create({ ...chat(part), stream: true })) {
      said += chunk.choices[0]?.delta.content ?? "";
    }
    assert.equal(said, answer);
    assert.equal(await client.chat.completions.stream(chat(part)).finalContent(), answer);
  });

  await step(`responses by ${way}`, async () => {
    const whole = await client.responses.create(input(inputPart));
    assert.equal(whole.output_text, answer);
    const next = await client.responses.create({ ...input(), previous_response_id: whole.id });
    assert.equal(next.output_text, answer, "the picture is still there");
  });

  await step(`responses by ${way}, streamed`, async () => {
    let said = "";
    for await (const event of await client.responses.create({ ...input(inputPart), stream: true })) {
      if (event.type === "response.output_text.delta") said += event.delta;
    }
    assert.equal(said, answer);
    assert.equal((await client.responses.stream(input(inputPart)).finalResponse()).output_text, answer);
  });

  await step(`by ${way}, then by its name`, async () => {
    await client.chat.completions.create(chat({ ...part, uuid: way }));
    const again = await client.chat.completions.create(chat({ type: "image_url", image_url: null, uuid: way }));
    assert.equal(again.choices[0].message.content, answer);
  });
}

await step("errors", async () => {
  for (const [part, name] of [
    [{ type: "image_url", image_url: { url: "data:image/png;base64,AAAA" } }, "image_url.url"],
    [{ type: "image_url", image_url: { url: "http://127.0.0.1:9/a.png" } }, "image_url.url"],
    [{ type: "image_url", image_url: { url: "file:///etc/passwd" } }, "image_url.url"],
    [{ type: "image_url", uuid: "never sent" }, "uuid"],
  ]) {
    await assert.rejects(
      client.chat.completions.create(chat(part)),
      (error) => error instanceof OpenAI.BadRequestError && error.param === `messages[0].content[0].${name}`,
    );
  }
});
