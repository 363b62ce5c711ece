// Watches a server in a real browser: `node panel.mjs SCENE CHROMIUM URL KEY PID FOLDER`. What is not as expected ends it with an error.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { chromium } from "playwright-core";

const LIMIT_MS = 30_000;
const FLAGS = [
  "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
];
const [scene, executablePath, url, key, pid, folder] = process.argv.slice(2);
const heard = [], requested = [];

async function until(what, ask) {
  const deadline = Date.now() + LIMIT_MS;
  while (!(await ask())) {
    assert.ok(Date.now() < deadline, `never: ${what}; the console said ${JSON.stringify(heard)}`);
    await sleep(50);
  }
}

// What the console has heard since the last call.
function complaints() {
  return heard.splice(0);
}

async function open(options) {
  const profile = join(folder, "profile");
  const context = await chromium.launchPersistentContext(profile, { executablePath, args: FLAGS, chromiumSandbox: false, ...options });
  context.setDefaultTimeout(LIMIT_MS);
  context.on("request", (request) => requested.push(request.url()));
  const [page] = context.pages();
  page.on("console", (message) => heard.push(`${message.type()}: ${message.text()}`));
  page.on("pageerror", (error) => heard.push(`error: ${error.message}`));
  await page.goto(url);
  return page;
}

async function unlock(page) {
  await page.fill("#secret", key);
  await page.press("#secret", "Enter");
  await page.waitForSelector("#content", { state: "visible" });
  await page.waitForSelector("#key", { state: "hidden" });
}

// The size of a picture, which its first bytes say, after it is written.
async function picture(page, name) {
  const path = join(folder, `${name}.png`);
  const bytes = await page.screenshot({ path });
  assert.deepEqual(await readFile(path), bytes);
  assert.equal(bytes.subarray(1, 4).toString(), "PNG");
  assert.ok(bytes.length > 10_000, `${name} is all but empty`);
  return { width: bytes.readUInt32BE(16), height: bytes.readUInt32BE(20) };
}

async function load(number) {
  const prompt = Array.from({ length: 80 }, (_, place) => (number * 7 + place) % 250);
  const body = JSON.stringify({ model: "default", prompt, max_tokens: 200, ignore_eos: true });
  const headers = { Authorization: `Bearer ${key}`, "Content-Type": "application/json" };
  const answer = await fetch(`${url}/v1/completions`, { method: "POST", headers, body });
  assert.equal(answer.status, 200, await answer.text());
}

async function watch() {
  const size = { width: 1200, height: 1400 };
  const page = await open({ viewport: size, colorScheme: "light" });
  const text = (id) => page.textContent(`#${id}`);
  const number = async (id) => Number((await text(id)).replaceAll(",", ""));
  const bars = () => page.locator("#steps rect").count();
  const lastStep = async () => Number((/step ([0-9,]+)$/.exec(await text("steps")) ?? [])[1]?.replaceAll(",", "") ?? -1);
  const widths = () => page.locator(".bar .used").evaluateAll((parts) => parts.map((part) => part.getBoundingClientRect().width));

  await page.waitForSelector("#key", { state: "visible" });
  assert.equal(await text("state"), "locked");
  assert.ok(!(await page.isVisible("#content")));
  const locked = complaints();
  assert.ok(locked.length > 0 && locked.every((line) => line.includes("401")), "only the refusal itself");
  await page.fill("#secret", "wrong");
  await page.click("#key button");
  await until("a wrong key is refused", async () => (await text("banner")).includes("does not know this key"));
  await unlock(page);
  assert.deepEqual([await text("name"), await text("state"), await text("running")], ["default", "ready", "0"]);
  assert.equal(await page.title(), "default - firstlight");
  assert.ok(!(await page.isVisible("#banner")));
  assert.match(await text("groups"), /kda \(state\).*mla \(rows\)/);
  assert.match(await text("operators"), /gated_delta/);
  assert.deepEqual([await bars(), await lastStep(), Math.max(...(await widths()))], [0, -1, 0]);
  complaints();

  const loads = Array.from({ length: 5 }, (_, place) => load(place));
  await until("three run and two wait", async () => (await text("running")) === "3" && (await text("waiting")) === "2");
  assert.deepEqual([await text("state"), await text("waiting-by")], ["serving", "2 standard"]);
  await until("tokens come", async () => (await number("decode-rate")) > 0);
  await until("bars stand", async () => (await bars()) > 10 && Boolean(await page.getAttribute("#minute path.decode", "d")));
  assert.ok(Math.max(...(await widths())) > 1, "widths are set in spite of the policy");
  const seen = await lastStep();
  assert.ok(seen > 0);
  await until("the timeline grows", async () => (await lastStep()) > seen);
  assert.deepEqual(await picture(page, "light"), size);
  await Promise.all(loads);
  await until("nobody runs", async () => (await text("running")) === "0" && (await text("state")) === "ready");
  assert.match(await text("totals"), /5 length.*generated tokens1,000/);
  assert.equal(await page.textContent("#latency tr:has-text('standard') td:nth-child(2)"), "5");
  await page.locator("#steps rect").last().hover();
  await until("the bar under the mouse is read out", async () => /^Step [0-9,]+, .* ago: /.test(await text("tip")));
  await page.reload();
  await page.waitForSelector("#content", { state: "visible" });
  assert.ok(!(await page.isVisible("#key")), "the key outlives a reload");
  assert.deepEqual(complaints(), []);

  process.kill(Number(pid), "SIGKILL");
  await page.waitForSelector("#banner", { state: "visible" });
  assert.equal(await text("state"), "no answer");
  assert.match(await text("banner"), /has not answered since/);
  assert.ok(await page.isVisible("#content.stale"));
  const alone = complaints();
  assert.ok(alone.every((line) => /ERR_(CONNECTION_REFUSED|CONNECTION_RESET|EMPTY_RESPONSE)/.test(line)), JSON.stringify(alone));
  return page;
}

async function dark() {
  const size = { width: 500, height: 900 };
  const page = await open({ viewport: size, colorScheme: "dark" });
  await unlock(page);
  assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= window.innerWidth), "nothing sticks out at the side");
  const colors = await page.evaluate(() => {
    const style = getComputedStyle(document.body);
    return [style.backgroundColor, style.color].map((color) => color.match(/[0-9]+/g).map(Number));
  });
  assert.ok(Math.max(...colors[0]) < 60 && Math.min(...colors[1]) > 200, `text stands out from its ground: ${JSON.stringify(colors)}`);
  assert.deepEqual(await picture(page, "dark"), size);
  return page;
}

const page = await { watch, dark }[scene]();
await page.context().close();
const outside = requested.filter((each) => !each.startsWith(`${url}/`) && !each.startsWith("data:"));
console.log(JSON.stringify({ outside, count: requested.length }));
