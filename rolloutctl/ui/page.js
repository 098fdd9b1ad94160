"use strict";
/* Draws the report from the data in the page. All content is inserted as text, never as markup, because models and tools
   wrote it. The page's Content-Security-Policy allows only this script, by its digest, and no requests. */

const data = JSON.parse(document.getElementById("data").textContent);
const rollouts = data.rollouts;
const byIndex = new Map(rollouts.map((rollout) => [rollout.index, rollout]));
const PAGE = 200; // rows drawn at a time, because thousands of table rows make scrolling slow
const $ = (id) => document.getElementById(id);

// ---------------------------------------------------------------- making elements

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name === "tone") element.style.setProperty("--tone", value);
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function replace(element, children) {
  element.replaceChildren(...children.filter((child) => child !== null));
}

// ---------------------------------------------------------------- words and numbers

const number = (value, digits = 2) => (value === null || value === undefined ? "–" : Number(value.toFixed(digits)).toString());
const count = (value) => value.toLocaleString("en-US");
const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)}%`);

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${Math.round(value * 1000)} ms`;
  if (value < 9.95) return `${value.toFixed(1)} s`;
  if (value < 119.5) return `${Math.round(value)} s`;
  if (value < 7170) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

function when(unix) {
  return unix ? new Date(unix * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" }) : null;
}

const MASKED = { InfraFailed: "!", VerifierFailed: "?", Cancelled: "×" };
const ended = (rollout) => (rollout.outcome === "Completed" ? rollout.stopReason || "Completed" : rollout.outcome);
const hasReward = (rollout) => rollout.reward !== null && rollout.reward !== undefined;

function rewardTone(reward) {
  const share = Math.max(0, Math.min(1, reward));
  return share < 0.5
    ? `color-mix(in oklab, var(--mid) ${Math.round(share * 200)}%, var(--bad))`
    : `color-mix(in oklab, var(--good) ${Math.round((share - 0.5) * 200)}%, var(--mid))`;
}

function tone(rollout) {
  if (rollout.outcome !== "Completed") return "var(--masked)";
  return hasReward(rollout) ? rewardTone(rollout.reward) : "var(--accent)";
}

function quantile(sorted, share) {
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : null;
}

// ---------------------------------------------------------------- head and charts

function drawHead() {
  const job = data.job;
  $("name").textContent = job.name;
  $("about").textContent = [job.mode, job.model, job.agent && `agent ${job.agent}`, when(job.started), job.location]
    .filter(Boolean).join("  ·  ");
  if (job.aborted) showState(`This run was aborted: ${job.aborted}`);
  else if (job.sealed < job.total) showState(`This run is not finished: ${count(job.sealed)} of ${count(job.total)} rollouts have ended.`);
  $("made").textContent = `Made ${when(data.made)} by rolloutctl report. This file is self-contained.`;

  const figures = data.figures;
  const tiles = [
    ["Mean reward", number(figures.mean, 3), figures.standardError === null ? "" : `± ${number(figures.standardError, 3)} (standard error) over ${count(figures.graded)} graded`],
    ["pass@1", percent(figures.passAt1), "share that passed everything"],
    figures.k > 1 ? [`pass@${figures.k}`, percent(figures.passAtK), `at least one of ${figures.k} passes`] : null,
    ["Rollouts", count(job.sealed), `${count(data.groups.length)} tasks × ${count(job.groupSize)}`],
    ["Masked", count(figures.masked), "excluded from training and means"],
    ["Tokens", count(figures.promptTokens + figures.completionTokens), `${count(figures.completionTokens)} of them generated`],
    ["Wall time", seconds(figures.wallSeconds), `${count(figures.turns)} turns, ${count(figures.toolCalls)} tool calls`],
  ];
  replace($("figures"), tiles.map((tile) => tile && make("div", {}, make("dt", {}, tile[0]), make("dd", {}, tile[1], make("small", {}, tile[2])))));
}

function showState(text) {
  $("state").hidden = false;
  $("state").textContent = text;
}

function drawOutcomes() {
  const rows = Object.entries(data.figures.outcomes); // the most frequent first
  const most = rows.length ? rows[0][1] : 1;
  replace($("outcomes"), rows.map(([name, amount]) => {
    const color = name in MASKED ? "var(--masked)" : name === "Finished" ? "var(--good)" : "var(--mid)";
    const bar = make("button", { type: "button", title: `Show only ${name}` },
      make("span", { className: "label" }, name),
      make("span", { className: "track" }, fill(amount / most, color)),
      make("span", { className: "number" }, count(amount)));
    bar.addEventListener("click", () => { $("ended").value = name; filter(); $("rollouts").scrollIntoView(); });
    return make("li", {}, bar);
  }));
  replace($("ended"), [make("option", { value: "" }, "any way"), ...rows.map(([name, amount]) => make("option", { value: name }, `${name} (${amount})`))]);
}

function fill(share, color) {
  const bar = make("span", { className: "fill", tone: color });
  bar.style.width = `${(100 * share).toFixed(1)}%`;
  return bar;
}

// Returns an SVG of this size, and a function that adds a shape to it.
function drawing(width, height, label) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  const add = (tag, attributes, text) => {
    const shape = document.createElementNS(svg.namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes)) shape.setAttribute(name, value);
    if (text !== undefined) shape.textContent = text;
    svg.append(shape);
    return shape;
  };
  return [svg, add];
}

function drawCurve() {
  const points = data.batches.filter((batch) => batch.mean !== null);
  if (points.length < 2) return;
  $("curve-card").hidden = false;
  const means = points.map((batch) => batch.mean);
  const low = Math.min(0, ...bounds(means)), high = Math.max(1, ...bounds(means));
  const x = (i) => 44 + 1056 * i / (points.length - 1), y = (mean) => 190 - 170 * (mean - low) / (high - low);
  const [svg, add] = drawing(1120, 220, "Mean reward by label: " + points.map((batch) => `${batch.label}: ${number(batch.mean, 3)}`).join(", "));
  for (let i = 0; i <= 4; i += 1) {
    const mean = low + (high - low) * i / 4;
    add("line", { x1: 44, x2: 1100, y1: y(mean), y2: y(mean) });
    add("text", { x: 20, y: y(mean) + 4 }, number(mean, 2));
  }
  add("polyline", { points: points.map((batch, i) => `${x(i)},${y(batch.mean)}`).join(" ") });
  const every = Math.ceil(points.length / 12); // at most about 12 labels fit next to each other
  points.forEach((batch, i) => {
    const title = document.createElementNS(svg.namespaceURI, "title");
    title.textContent = `${batch.label}: ${number(batch.mean, 3)} over ${count(batch.graded)} graded`;
    add("circle", { cx: x(i), cy: y(batch.mean), r: 4 }).append(title);
    if (i % every === 0) add("text", { x: Math.min(x(i), 1080), y: 212 }, batch.label.length > 12 ? batch.label.slice(0, 11) + "…" : batch.label);
  });
  replace($("curve"), [svg]);
}

function drawRewards() {
  const rewards = rollouts.filter(hasReward).map((rollout) => rollout.reward);
  if (!rewards.length) return replace($("rewards"), [make("p", { className: "hint" }, "No rollout has a reward.")]);
  const low = Math.min(0, ...bounds(rewards)), high = Math.max(1, ...bounds(rewards));
  const bins = new Array(11).fill(0); // 0, 0.1 … 1: rewards are mostly fractions of a few tests
  for (const reward of rewards) bins[Math.round(10 * (reward - low) / (high - low))] += 1;
  const [svg, add] = drawing(330, 150, "Rollouts by reward: " + bins.map((amount, i) => `${number(low + (high - low) * i / 10)}: ${amount}`).join(", "));
  const most = Math.max(...bins);
  add("line", { x1: 0, x2: 330, y1: 130.5, y2: 130.5 });
  bins.forEach((amount, i) => {
    const height = Math.max(amount ? 2 : 0, 108 * amount / most);
    add("rect", { x: 30 * i + 4, y: 130 - height, width: 22, height, rx: 2 });
    if (amount) add("text", { x: 30 * i + 15, y: 125 - height }, count(amount));
    if (i % 5 === 0) add("text", { x: 30 * i + 15, y: 146 }, number(low + (high - low) * i / 10));
  });
  return replace($("rewards"), [svg]);
}

function bounds(values) {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

function drawTimes() {
  const parts = ["boot", "model", "tools", "agent", "verifier", "total"];
  const named = [...new Set(rollouts.flatMap((rollout) => Object.keys(rollout.seconds || {})))];
  const order = [...parts.filter((part) => named.includes(part)), ...named.filter((part) => !parts.includes(part)).sort()];
  const values = (part) => rollouts.map((rollout) => (rollout.seconds || {})[part]).filter((value) => value !== undefined).sort((a, b) => a - b);
  const sum = (list) => list.reduce((total, value) => total + value, 0);
  const all = sum(values("total")) || 1;
  replace($("times").tBodies[0], order.map((part) => {
    const sorted = values(part), share = Math.min(1, sum(sorted) / all);
    return make("tr", {}, make("th", { scope: "row" }, part), make("td", { className: "number" }, seconds(quantile(sorted, 0.5))),
      make("td", { className: "number" }, seconds(quantile(sorted, 0.95))),
      make("td", {}, make("span", { className: "track", title: percent(share) }, fill(share, "var(--accent)"))));
  }));
}

// ---------------------------------------------------------------- tables

class Table {
  /* A sortable table that draws PAGE rows at a time. `columns`: {title, key: row => sortable, cell: row => td, number}. */
  constructor(table, more, columns, describe) {
    Object.assign(this, { body: table.tBodies[0], more, columns, describe, rows: [], shown: PAGE, sort: null, down: false });
    this.heads = columns.map((column) => {
      const button = make("button", { type: "button" }, column.title);
      const head = make("th", { scope: "col", className: column.number ? "number" : "" }, button);
      button.addEventListener("click", () => this.sortBy(column));
      return head;
    });
    replace(table.tHead, [make("tr", {}, ...this.heads)]);
    more.addEventListener("click", () => { this.shown += 5 * PAGE; this.draw(); });
  }
  sortBy(column) {
    this.down = this.sort === column ? !this.down : false;
    this.sort = column;
    this.heads.forEach((head, i) => head.setAttribute("aria-sort", this.columns[i] !== column ? "none" : this.down ? "descending" : "ascending"));
    this.show(this.rows);
  }
  show(rows) {
    this.rows = rows;
    this.shown = PAGE;
    if (this.sort) {
      const key = this.sort.key, sign = this.down ? -1 : 1;
      this.rows = [...rows].sort((a, b) => {
        const x = key(a), y = key(b);
        if (x === y || (missing(x) && missing(y))) return 0;
        if (missing(x) || missing(y)) return missing(x) ? 1 : -1; // rows without a value are last in both directions
        return x < y ? -sign : sign;
      });
    }
    this.draw();
  }
  draw() {
    replace(this.body, this.rows.slice(0, this.shown).map((row) => make("tr", {}, ...this.columns.map((column) => column.cell(row)))));
    const left = this.rows.length - this.shown;
    this.more.hidden = left <= 0;
    this.more.textContent = `Show ${count(Math.min(left, 5 * PAGE))} more of ${count(left)} ${this.describe}`;
  }
}

const missing = (value) => value === null || value === undefined;
const cell = (text, className) => make("td", { className }, text);
const numeric = (text) => cell(text, "number");

function member(rollout) {
  const masked = rollout.outcome !== "Completed";
  const label = masked ? MASKED[rollout.outcome] : hasReward(rollout) ? number(rollout.reward, 1).replace("0.", ".") : "–";
  const words = `Rollout ${rollout.index}: ${hasReward(rollout) ? `reward ${number(rollout.reward, 3)}, ` : ""}${ended(rollout)}`;
  return make("a", { className: masked ? "member masked" : "member", href: `#rollout-${rollout.index}`, tone: tone(rollout), title: words, "aria-label": words }, label);
}

const groupColumns = [
  { title: "task", key: (g) => g.task, cell: (g) => {
    const link = make("a", { href: "#rollouts" }, g.task);
    link.addEventListener("click", () => { $("query").value = `task:${g.task}`; filter(); });
    return make("th", { scope: "row" }, link, ...(g.tags || []).map((tag) => make("span", { className: "tag" }, tag)));
  } },
  { title: "rollouts", key: (g) => g.mean, cell: (g) => make("td", { className: "members" }, ...g.members.map((index) => member(byIndex.get(index)))) },
  { title: "graded", number: true, key: (g) => g.graded, cell: (g) => numeric(count(g.graded)) },
  { title: "mean", number: true, key: (g) => g.mean, cell: (g) => numeric(number(g.mean)) },
  { title: "std", number: true, key: (g) => g.std, cell: (g) => numeric(number(g.std)) },
  { title: "pass@1", number: true, key: (g) => g.passAt1, cell: (g) => numeric(percent(g.passAt1)) },
  ...(data.figures.k > 1 ? [{ title: `pass@${data.figures.k}`, number: true, key: (g) => g.passAtK, cell: (g) => numeric(percent(g.passAtK)) }] : []),
];

const total = (rollout) => (rollout.seconds || {}).total;
const rolloutColumns = [
  { title: "#", number: true, key: (r) => r.index, cell: (r) => make("td", { className: "number" }, make("a", { href: `#rollout-${r.index}` }, String(r.index))) },
  { title: "task", key: (r) => r.task, cell: (r) => cell(r.task) },
  { title: "member", number: true, key: (r) => r.member, cell: (r) => numeric(String(r.member)) },
  { title: "reward", number: true, key: (r) => r.reward, cell: (r) => numeric(number(r.reward)) },
  { title: "ended", key: ended, cell: (r) => make("td", {}, make("span", { className: "badge", tone: tone(r) }, ended(r))) },
  { title: "turns", number: true, key: (r) => r.turns, cell: (r) => numeric(count(r.turns)) },
  { title: "tokens", number: true, key: (r) => r.tokens, cell: (r) => numeric(count(r.tokens)) },
  { title: "time", number: true, key: total, cell: (r) => numeric(seconds(total(r))) },
  { title: "message", key: (r) => r.message, cell: (r) => cell([r.reason, r.message].filter(Boolean).join(": "), "text") },
];

const groupTable = new Table($("groups"), $("more-groups"), groupColumns, "groups");
const listTable = new Table($("list"), $("more-rollouts"), rolloutColumns, "rollouts");

$("list").tBodies[0].addEventListener("click", (event) => {
  if (event.target.closest("a") || String(getSelection())) return;
  const link = event.target.closest("tr")?.querySelector("a");
  if (link) location.hash = link.hash;
});

// ---------------------------------------------------------------- search

const haystacks = new Map(rollouts.map((r) => [r.index, [r.index, r.task, ...(r.tags || []), r.outcome, r.stopReason, r.reason, r.message]
  .filter((part) => !missing(part)).join("\n").toLowerCase()]));
let search = 0; // number of the newest search; an older one that still reads transcripts stops

function rewardFits(rollout, wanted) {
  if (!wanted) return true;
  if (!hasReward(rollout)) return wanted === "none";
  if (wanted === "passed") return rollout.passed === true;
  if (wanted === "zero") return rollout.reward === 0;
  return wanted === "partial" && rollout.reward > 0 && rollout.reward < 1;
}

async function filter() {
  const mine = ++search;
  const words = $("query").value.toLowerCase().split(/\s+/).filter(Boolean);
  const task = words.find((word) => word.startsWith("task:"))?.slice(5);
  const terms = words.filter((word) => !word.startsWith("task:"));
  const how = $("ended").value, reward = $("reward").value, deep = $("deep").checked && terms.length > 0;
  const candidates = rollouts.filter((r) => (!how || ended(r) === how) && rewardFits(r, reward) && (missing(task) || r.task.toLowerCase() === task));
  const found = new Set(candidates.filter((r) => terms.every((term) => haystacks.get(r.index).includes(term))).map((r) => r.index));
  if (deep) {
    let read = 0;
    for (const group of new Set(candidates.map((r) => r.group))) {
      $("count").textContent = `Reading transcripts: ${count(read++)} of ${count(data.groups.length)} groups…`;
      const transcripts = await transcriptsOf(group);
      if (mine !== search) return;
      for (const rollout of candidates.filter((r) => r.group === group)) {
        const text = haystacks.get(rollout.index) + "\n" + textOf(transcripts[rollout.index]).toLowerCase();
        if (terms.every((term) => text.includes(term))) found.add(rollout.index);
      }
    }
  }
  const rows = candidates.filter((r) => found.has(r.index));
  listTable.show(rows);
  $("count").textContent = rows.length === rollouts.length ? `All ${count(rows.length)} rollouts` : `${count(rows.length)} of ${count(rollouts.length)} rollouts`;
}

function textOf(value) {
  if (typeof value === "string") return value;
  return value && typeof value === "object" ? Object.values(value).map(textOf).join("\n") : "";
}

let typing;
$("query").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(filter, 120); });
for (const id of ["ended", "reward", "deep"]) $(id).addEventListener("change", filter);
$("filters").addEventListener("submit", (event) => { event.preventDefault(); filter(); });
$("clear").addEventListener("click", () => { $("filters").reset(); filter(); $("query").focus(); });

// ---------------------------------------------------------------- transcripts

async function transcriptsOf(group) {
  const block = document.querySelector(`script[data-group="${group}"]`);
  if (!block) return {};
  const bytes = Uint8Array.from(atob(block.textContent), (letter) => letter.charCodeAt(0));
  const text = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  return JSON.parse(text);
}

function facts(pairs) {
  return make("dl", { className: "facts" }, ...pairs.filter((pair) => !missing(pair[1]) && pair[1] !== "")
    .map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, String(value)))));
}

function drawText(text, className = "") {
  // Long output scrolls in a separate box, which must be focusable for keyboard users.
  const long = text.length > 3000 || text.split("\n", 31).length > 30;
  return make("pre", { className: className + (long ? " long" : ""), tabindex: long ? "0" : undefined }, text);
}

function drawCall(call) {
  // The head of the call shows the first argument. Arguments that do not fit there are shown below.
  const head = call.arguments.length ? call.arguments[0][1].split("\n", 1)[0].slice(0, 100) : "";
  const rest = call.arguments.filter(([, value], i) => i > 0 || value !== head);
  const short = rest.filter(([, value]) => value.length <= 100 && !value.includes("\n"));
  const result = missing(call.result) ? make("p", { className: "note" }, "No result was recorded.") : drawText(call.result || "(empty)", call.error ? "result wrong" : "result");
  return make("details", { className: "call", open: true },
    make("summary", {}, make("b", {}, call.name), ` ${head}  `, make("span", { className: "note" }, [call.error ? "error" : "", call.seconds ? seconds(call.seconds) : ""].filter(Boolean).join(", "))),
    short.length ? make("p", { className: "argument" }, ...short.flatMap(([name, value]) => [`${name || "arguments"} `, make("code", {}, value), "   "])) : null,
    ...rest.filter((pair) => !short.includes(pair)).flatMap(([name, value]) => [make("p", { className: "argument" }, name || "arguments"), drawText(value)]),
    result);
}

function drawStep(step) {
  if (step.role === "note") return make("p", { className: "note" }, step.text);
  const tokens = step.tokens && step.tokens[1] ? `${count(step.tokens[0])} + ${count(step.tokens[1])} tokens` : "";
  const right = [tokens, step.seconds ? seconds(step.seconds) : ""].filter(Boolean).join(", ");
  return make("section", { className: `step ${step.role}` },
    make("h3", {}, make("span", {}, step.role === "assistant" ? `assistant, turn ${step.turn + 1}` : step.role), make("span", {}, right)),
    step.reasoning ? make("div", { className: "prose thinking" }, step.reasoning) : null,
    step.text ? make("div", { className: "prose" }, step.text) : null,
    ...(step.calls || []).map(drawCall));
}

function drawVerdict(rollout, verdict) {
  if (!verdict) return null;
  const tests = verdict.tests || [], failed = tests.filter((test) => !test.passed);
  return make("section", { className: verdict.passed ? "step verdict" : "step verdict failed" },
    make("h3", {}, make("span", {}, "verdict"), make("span", {}, `reward ${number(verdict.reward, 3)}`)),
    verdict.message ? make("div", { className: "prose" }, verdict.message) : null,
    verdict.forgeable ? make("p", { className: "note" }, "Graded in the agent's own workspace (Shared): the agent could have forged it.") : null,
    (verdict.dropped || []).length ? make("div", {}, make("p", {}, "Not carried into the grading, because these files could change the verdict:"), drawText(verdict.dropped.join("\n"))) : null,
    tests.length ? make("p", {}, `${count(tests.length - failed.length)} of ${count(tests.length)} tests passed.`) : null,
    ...failed.map((test) => make("div", {}, make("p", { className: "argument" }, test.name), drawText(test.message || "failed", "result wrong"))),
    ...(verdict.commands || []).map((command) => make("details", { className: "call", open: failed.length === 0 && command.exitCode !== 0 },
      make("summary", {}, make("b", {}, command.cause ? `ended by ${command.cause}` : `exit ${command.exitCode}`), ` ${command.command.split("\n", 1)[0].slice(0, 100)}  `, make("span", { className: "note" }, seconds(command.seconds))),
      drawText(command.output || "(no output)", "result"))));
}

function drawPlugin(plugin) {
  const did = [`${count(plugin.calls)} calls`, seconds(plugin.seconds), plugin.refused ? `${count(plugin.refused)} refused` : "", plugin.changed ? `${count(plugin.changed)} changed` : ""];
  return make("section", { className: "step plugin" },
    make("h3", {}, make("span", {}, `plugin ${plugin.name}`), make("span", {}, did.filter(Boolean).join(", "))),
    plugin.failed ? make("p", { className: "result wrong" }, `Failed ${count(plugin.failed)} times; the first error: ${plugin.error}`) : null,
    Object.keys(plugin.scores).length ? facts(Object.entries(plugin.scores).map(([name, value]) => [name, number(value, 3)])) : null,
    Object.keys(plugin.analysis).length ? drawText(JSON.stringify(plugin.analysis, null, 2)) : null);
}

let opener = null;

async function openRollout(index) {
  const rollout = byIndex.get(index);
  if (!rollout) return;
  const order = listTable.rows.some((r) => r.index === index) ? listTable.rows : rollouts;
  const position = order.findIndex((r) => r.index === index);
  $("reader-title").textContent = `#${index}  ${rollout.task}, member ${rollout.member}`;
  $("previous").disabled = position === 0;
  $("next").disabled = position === order.length - 1;
  $("previous").onclick = () => go(order[position - 1]);
  $("next").onclick = () => go(order[position + 1]);
  if (!$("reader").open) { opener = document.activeElement; $("reader").showModal(); }
  let shown = {};
  let trouble = null;
  try {
    shown = (await transcriptsOf(rollout.group))[index] || {};
  } catch (error) {
    trouble = `This browser cannot decompress the transcript (${error.message}). Use a browser of 2023 or later.`;
  }
  if (location.hash !== `#rollout-${index}`) return;
  const usage = rollout.usage || {};
  replace($("transcript"), [
    facts([["ended", ended(rollout)], ["reward", hasReward(rollout) ? number(rollout.reward, 3) : null], ["reason", rollout.reason], ["attempt", rollout.attempt],
      ["turns", rollout.turns], ["tool calls", rollout.toolCalls], ["tokens", `${count(usage.promptTokens || 0)} in, ${count(usage.completionTokens || 0)} out`],
      ["branches", rollout.branches > 1 ? rollout.branches : null], ["policy", (rollout.policyVersions || []).join(", ")], ["seed", rollout.seed],
      ...Object.entries(rollout.seconds || {}).map(([part, value]) => [part, seconds(value)])]),
    rollout.message ? make("p", { className: "prose" }, rollout.message) : null,
    ...(rollout.failedAttempts || []).map((failed) => make("p", { className: "note" }, `Attempt ${failed.attempt} was lost: ${failed.reason}${failed.message ? `: ${failed.message}` : ""}`)),
    trouble ? make("p", { className: "banner" }, trouble) : null,
    ...(shown.steps || []).map(drawStep),
    !trouble && !(shown.steps || []).length ? make("p", { className: "note" }, "No transcript was recorded.") : null,
    drawVerdict(rollout, shown.verdict),
    ...(shown.plugins || []).map(drawPlugin),
  ]);
  $("transcript").scrollTop = 0;
  $("transcript").focus({ preventScroll: true });
}

function go(rollout) {
  if (rollout) location.replace(`#rollout-${rollout.index}`);
}

function followAddress() {
  const index = /^#rollout-(\d+)$/.exec(location.hash);
  if (index) openRollout(Number(index[1]));
  else if ($("reader").open) $("reader").close();
}

$("close").addEventListener("click", () => $("reader").close());
$("reader").addEventListener("click", (event) => { if (event.target === $("reader")) $("reader").close(); });
$("reader").addEventListener("close", () => {
  if (location.hash.startsWith("#rollout-")) history.replaceState(null, "", location.pathname + location.search);
  if (opener && opener.isConnected) opener.focus();
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if ($("reader").open) {
    if (event.key === "j" || event.key === "ArrowRight") $("next").click();
    if (event.key === "k" || event.key === "ArrowLeft") $("previous").click();
  } else if (event.key === "/" && !event.target.closest("input, select, textarea")) {
    event.preventDefault();
    $("query").focus();
  }
});
addEventListener("hashchange", followAddress);

drawHead();
drawOutcomes();
drawRewards();
drawCurve();
drawTimes();
groupTable.show(data.groups);
filter();
followAddress();
