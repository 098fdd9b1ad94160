/* Where the pages get what they show: from the server, or, in a report, from the file itself. */

import { fits, type Condition, type Field, type Values } from "./where";

export type Row = Values & {
  index: number; group: number; member: number; task: string; tag: string[]; outcome: string; ended: string;
  reward?: number; passed?: boolean; turns: number; tools: number; tokens: number; seconds?: number; message?: string;
  reason?: string; error?: string; dropped: number; forgeable: boolean; lost: number; label?: string;
};
export type RunRow = {
  folder: string; name: string; created: number; model: string; mode: string; agent: string; tasks: number; k: number;
  total: number | null; sealed: number; masked: number; mean: number | null; standardError: number | null;
  passAt1: number | null; passAtK: number | null; tokens: number; duration: number | null; cost: number | null;
  currency: string | null; state: string; aborted: string | null; damaged: string | null;
};
export type Cause = { kind: string; title: string; count: number; first: number; message: string | null; where: string };
export type Flight = { index: number; task: string; member: number; attempt: number; turn: number; doing: string; since: number | null };
export type Health = {
  processes: number; failingCalls: number; callRetries: number; rateLimitedCalls: number; callProblem: string | null; silentSeconds: number;
  silentPlace: string | null; storageFailures: number; sandboxes: Record<string, number>; sandboxProblem: string | null; lostAttempts: Record<string, number>;
};
export type Summary = {
  health: Health | null;
  folder: string; name: string; uri: string; created: number; mode: string; model: string; agent: string; state: string;
  command: string | null; canBranch: boolean;
  latest: number | null; aborted: string | null; error: string | null; isReading: boolean; problem: string | null; damaged: Record<string, string>;
  inFlight: { count: number; shown: Flight[] }; fields: Field[]; time: number; sealed: number; read: number; turns: number; tools: number;
  promptTokens: number; completionTokens: number; cachedTokens: number; started: number | null; finished: number | null;
  masked: number; lost: number; cheats: number; forgeable: number; total: number | null; k: number; groups: number; cost: number | null;
  currency: string | null; graded: number; mean: number | null; standardError: number | null; passAt1: number | null;
  passAtK: number | null; ended: Record<string, number>; histogram: { low: number; high: number; counts: number[] } | null;
  parts: { name: string; median: number; p95: number; share: number }[];
  labels: { label: string; graded: number; mean: number }[]; causes: Cause[]; perMinute: number | null; secondsLeft: number | null;
};
export type Call = { name: string; arguments?: [string, string][]; result?: string | null; error?: boolean; seconds?: number; diff?: string; traceback?: string | null };
export type Step = {
  role: string; text?: string; turn?: number | null; reasoning?: string; calls?: Call[]; seconds?: number; tokens?: [number, number];
};
export type FileText = { text: string | null; bytes: number; isWhole: boolean; diff: string | null };
export type Span = { kind: string; start: number; end: number; turn?: number; name?: string };
export type Verdict = {
  reward: number; passed: boolean; mode?: string; message?: string; forgeable?: boolean; dropped?: string[];
  commands?: { command: string; exitCode?: number; seconds: number; output: string; cause?: string }[];
  tests?: { name: string; passed: boolean; message?: string }[]; rewards?: Record<string, number>;
};
export type PluginReport = { failed?: number; error?: string; traceback?: string };
export type RolloutPage = {
  task: string; member: number; doing: { turn: number; doing: string; since: number | null } | null;
  steps: Step[]; timeline: Span[]; verdict: Verdict | null; result: (Values & {
    index: number; group: number; member: number; task: string; outcome: string; stopReason?: string; reason?: string; message?: string;
    traceback?: string; toolTracebacks?: Record<string, string>; reward?: number; attempt: number; turns?: number; toolCalls?: number;
    failedAttempts?: { attempt: number; reason: string; message?: string }[]; seconds?: Record<string, number>;
    plugins?: Record<string, PluginReport>; usage?: Record<string, number>;
  }) | null; advantage: number | null; problem: string | null;
};
export type Strip = { tokens: number; spans: { mask: number; policy: string | null; count: number; ids: number[]; texts: string[]; logprobs: (number | null)[] }[] };
export type Entry = { path: string; kind: string; bytes: number; mode: string; change?: "changed" | "new" };
export type Comparison = {
  before: string; after: string; counts: Record<"all" | "changed" | "better" | "worse", number>; onlyBefore: number; onlyAfter: number;
  /** The worst ones of those that were asked for. */
  tasks: { task: string; before: number; after: number }[];
  meanBefore: number | null; meanAfter: number | null; difference: number | null; confidenceInterval: [number, number] | null;
  manifest: string[];
};
export type Query = { where: Condition | null; sort: string; descending: boolean; offset: number; limit: number };

export interface Source {
  /** Whether it has everything that the server has: raw requests, tokens, files, other runs. */
  isServer: boolean;
  runs(): Promise<{ uri: string; runs: RunRow[] }>;
  /** Calls back with the summary now and at each change; returns a function that ends that. */
  follow(run: string, tell: (summary: Summary) => void, fail: (problem: string) => void): () => void;
  rollouts(run: string, query: Query): Promise<{ count: number; rows: Row[] }>;
  groups(run: string, where: Condition | null, worst: boolean, offset: number, limit: number): Promise<{ count: number; groups: Row[][] }>;
  rollout(run: string, index: number): Promise<RolloutPage>;
  raw(run: string, index: number, turn: number): Promise<{ text: string; isWhole: boolean }>;
  tokens(run: string, index: number): Promise<Strip[]>;
  files(run: string, index: number): Promise<Entry[]>;
  file(run: string, index: number, path: string): Promise<FileText>;
  compare(before: string, after: string, show: string): Promise<Comparison>;
}

const FIRST_PAUSE = 500, LONGEST_PAUSE = 5_000; // milliseconds until a lost connection is made again

class Server implements Source {
  isServer = true;

  async get<T>(path: string, parameters: Record<string, string | number | boolean | null> = {}): Promise<T> {
    const given = Object.entries(parameters).filter(([, value]) => value !== null && value !== false);
    const query = new URLSearchParams(given.map(([name, value]) => [name, String(value)]));
    let response: Response;
    try {
      // A redirect leads to a login page of the proxy in front of the viewer, which is not what was asked for.
      response = await fetch(`api/${path}?${query}`, { redirect: "manual" });
    } catch {
      throw new Error("The server does not answer. It may have ended: start rolloutctl view again.");
    }
    const found = await response.json().catch(() => null);
    if (!response.ok && found?.error) throw new Error(found.error);
    if (response.type === "opaqueredirect" || response.status === 401 || response.status === 403) {
      throw new Error("The proxy in front of the viewer refuses the request. Your login may have expired: reload the page.");
    }
    if (!response.ok || found === null) {
      throw new Error(`The proxy in front of the viewer answers ${response.status} ${response.statusText}. The viewer may be restarting.`);
    }
    return found as T;
  }

  runs() { return this.get<{ uri: string; runs: RunRow[] }>("runs"); }

  follow(run: string, tell: (summary: Summary) => void, fail: (problem: string) => void) {
    // The first answer comes by a request, because events do not say why they fail.
    let events: EventSource | null = null, timer = 0, isOver = false, isFollowed = false, pause = FIRST_PAUSE;
    const again = () => {
      events?.close();
      if (!isOver) timer = setTimeout(start, pause);
      pause = Math.min(2 * pause, LONGEST_PAUSE);
    };
    const start = () => this.get<Summary>("run", { run }).then((summary) => {
      if (isOver) return;
      isFollowed = true;
      tell(summary);
      events = new EventSource(`api/events?${new URLSearchParams({ run })}`);
      events.onmessage = (event) => { pause = FIRST_PAUSE; tell(JSON.parse(event.data)); };
      events.addEventListener("end", () => events?.close());
      // A proxy cuts long answers. The browser itself would wait 3 s, and would give up when a proxy answers 502.
      events.onerror = again;
    }, (error: Error) => {
      if (isOver) return;
      fail(error.message);
      if (isFollowed) again();
    });
    start();
    return () => { isOver = true; clearTimeout(timer); events?.close(); };
  }

  rollouts(run: string, query: Query) {
    return this.get<{ count: number; rows: Row[] }>("rollouts", { run, ...query, where: written(query.where) });
  }

  groups(run: string, where: Condition | null, worst: boolean, offset: number, limit: number) {
    return this.get<{ count: number; groups: Row[][] }>("groups", { run, where: written(where), worst, offset, limit });
  }

  rollout(run: string, index: number) { return this.get<RolloutPage>("rollout", { run, index }); }
  raw(run: string, index: number, turn: number) { return this.get<{ text: string; isWhole: boolean }>("raw", { run, index, turn }); }
  tokens(run: string, index: number) { return this.get<Strip[]>("tokens", { run, index }); }
  files(run: string, index: number) { return this.get<Entry[]>("files", { run, index }); }
  file(run: string, index: number, path: string) {
    return this.get<FileText>("file", { run, index, path });
  }
  compare(before: string, after: string, show: string) { return this.get<Comparison>("compare", { before, after, show }); }
}

const written = (where: Condition | null) => (where === null ? null : JSON.stringify(where));

/** The data of a report: the summary and all rows; transcripts by group, compressed, in elements of their own. */
export type Embedded = { summary: Summary; rows: Row[] };

class Report implements Source {
  isServer = false;
  private groupsRead = new Map<number, Promise<Record<string, RolloutPage>>>();

  constructor(private data: Embedded) {}

  async runs() { return { uri: this.data.summary.uri, runs: [] }; }

  follow(_run: string, tell: (summary: Summary) => void) { tell(this.data.summary); return () => {}; }

  async rollouts(_run: string, query: Query) {
    const found = this.data.rows.filter((row) => fits(query.where, row));
    found.sort((a, b) => compared(a, b, query.sort, query.descending));
    return { count: found.length, rows: found.slice(query.offset, query.offset + query.limit) };
  }

  async groups(_run: string, where: Condition | null, worst: boolean, offset: number, limit: number) {
    const groups = new Map<number, Row[]>();
    for (const row of this.data.rows) if (fits(where, row)) groups.set(row.group, [...(groups.get(row.group) ?? []), row]);
    const listed = [...groups.values()];
    if (worst) listed.sort((a, b) => (meanReward(a) ?? Infinity) - (meanReward(b) ?? Infinity) || a[0]!.group - b[0]!.group);
    return { count: listed.length, groups: listed.slice(offset, offset + limit) };
  }

  async rollout(_run: string, index: number) {
    const row = this.data.rows.find((found) => found.index === index);
    if (!row) throw new Error(`This report has no rollout ${index}.`);
    if (!this.groupsRead.has(row.group)) this.groupsRead.set(row.group, unpacked(row.group));
    const page = (await this.groupsRead.get(row.group)!)[index];
    if (!page) throw new Error(`This report has no transcript of rollout ${index}.`);
    return page;
  }

  private absent(): never { throw new Error("A report does not contain this. Open the run with rolloutctl view."); }
  async raw() { return this.absent(); }
  async tokens() { return this.absent(); }
  async files() { return this.absent(); }
  async file() { return this.absent(); }
  async compare() { return this.absent(); }
}

async function unpacked(group: number): Promise<Record<string, RolloutPage>> {
  const packed = document.querySelector(`script[data-group="${group}"]`)?.textContent ?? "";
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function compared(a: Row, b: Row, field: string, descending: boolean): number {
  const [x, y] = [a[field], b[field]];
  const missing = Number(x === undefined) - Number(y === undefined);
  if (missing) return missing;
  const order = x === y ? 0 : (x as number) < (y as number) ? -1 : 1;
  return (descending ? -order : order) || a.index - b.index;
}

export function meanReward(rows: Row[]): number | null {
  const rewards = rows.flatMap((row) => (row.reward === undefined ? [] : [row.reward]));
  return rewards.length ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length : null;
}

export const failedPlugins = (result: NonNullable<RolloutPage["result"]>) =>
  Object.entries(result.plugins ?? {}).filter(([, report]) => report.failed);

export function openSource(): Source {
  const embedded = document.getElementById("data");
  return embedded ? new Report(JSON.parse(embedded.textContent!)) : new Server();
}
