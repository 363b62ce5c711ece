// Asks a server through OpenAI's npm package and says what came of it: `node client.mjs URL KEY`. tests/serve/test_npm.py judges.
import { setTimeout as sleep } from "node:timers/promises";
import OpenAI from "openai";

const LIMIT_MS = 60_000;
const [url, key] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0, timeout: LIMIT_MS });
const { chat, completions, models } = client;

const prompts = { model: "default", prompt: ["a", "b"], n: 2, max_tokens: 8, seed: 1, logprobs: 1 };
const talk = { model: "default", messages: [{ role: "user", content: "hi" }], max_tokens: 40, seed: 5, thinking: { type: "disabled" } };
const size = { type: "string", enum: ["small", "large"] };
const schema = { type: "object", properties: { size }, required: ["size"], additionalProperties: false };
const pick = { name: "pick", description: "Pick a size.", parameters: schema, strict: true };
const tooled = { ...talk, max_tokens: 300, tools: [{ type: "function", function: pick }], tool_choice: "required", parallel_tool_calls: false };
const formed = { ...talk, max_tokens: 200, response_format: { type: "json_schema", json_schema: { name: "answer", strict: true, schema } } };
const long = { model: "default", prompt: "The first light", max_tokens: 20_000, ignore_eos: true, seed: 1 };

// Every chunk of a stream, read as the package gives it.
async function chunks(asked) {
  const found = [];
  for await (const chunk of await asked) found.push(chunk);
  return found;
}

// The answer of a chat as the package's own accumulator puts it together.
function gathered(asked) {
  return chat.completions.stream({ ...asked, stream_options: { include_usage: true } }).finalChatCompletion();
}

async function refusal(ask) {
  try {
    await ask();
  } catch (error) {
    const kind = Object.keys(OpenAI).find((name) => OpenAI[name] === error.constructor);
    const { status, code, param, type, message, requestID } = error;
    return { kind, status, code, param, type, message, requestID };
  }
  return null;
}

async function running() {
  const answer = await fetch(`${url}/metrics`, { headers: { Authorization: `Bearer ${key}` } });
  return Number(/^firstlight_requests_running(?:\{.*\})? (\S+)$/m.exec(await answer.text())[1]);
}

// The number of running sequences once it is the wanted one, or what it is when time is up.
async function settled(wanted) {
  const deadline = Date.now() + LIMIT_MS / 4;
  let count = await running();
  while (count !== wanted && Date.now() < deadline) {
    await sleep(20);
    count = await running();
  }
  return count;
}

async function leaveStream() {
  const stream = await completions.create({ ...long, stream: true });
  let read = 0, during = null;
  for await (const _ of stream) {
    read += 1;
    if (read === 2) {
      during = await running();
      stream.controller.abort();
    }
  }
  return { read, during, after: await settled(0) };
}

async function leaveWhole() {
  const controller = new AbortController();
  const answer = refusal(() => completions.create(long, { signal: controller.signal }));
  const during = await settled(1);
  controller.abort();
  return { during, ...(await answer), after: await settled(0) };
}

async function runTool() {
  const calls = [];
  const tool = { ...pick, parse: JSON.parse, function: (given) => { calls.push(given); return "done"; } };
  const choice = { type: "function", function: { name: "pick" } };
  await chat.completions.runTools({ ...tooled, tools: [{ type: "function", function: tool }], tool_choice: choice }).done();
  return calls;
}

const named = await chat.completions.create(talk, { headers: { "X-Request-Id": "from-npm" } }).withResponse();
console.log(JSON.stringify({
  asked: { prompts, talk },
  models: (await chunks(models.list())).map((model) => model.id),
  model: await models.retrieve("default"),
  completion: await completions.create(prompts),
  completionChunks: await chunks(completions.create({ ...prompts, stream: true, stream_options: { include_usage: true } })),
  chat: named.data,
  requestId: named.request_id,
  chatChunks: await chunks(chat.completions.create({ ...talk, stream: true, stream_options: { include_usage: true } })),
  chatGathered: await gathered(talk),
  call: await chat.completions.create(tooled),
  callGathered: await gathered(tooled),
  callsRun: await runTool(),
  form: await chat.completions.create(formed),
  formGathered: await gathered(formed),
  refusals: {
    temperature: await refusal(() => chat.completions.create({ ...talk, temperature: 9 })),
    messages: await refusal(() => chat.completions.create({ ...talk, messages: [] })),
    stream: await refusal(() => chat.completions.create({ ...talk, top_p: 2, stream: true })),
    context: await refusal(() => completions.create({ ...long, prompt: "x".repeat(200_000) })),
    model: await refusal(() => chat.completions.create({ ...talk, model: "nobody" })),
    key: await refusal(() => client.withOptions({ apiKey: "wrong" }).models.list()),
  },
  leftStream: await leaveStream(),
  leftWhole: await leaveWhole(),
}));
