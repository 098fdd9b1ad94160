import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { Bars, Curves, Histogram, Parts, tone } from "./charts";
import { ago, compact, count, money, number, percent, plural, seconds, when } from "./format";
import { Copy, Name, Problem, Resume, State, Tiles, useAsync, useKeys, useSummary, useTitle } from "./parts";
import { href, rolloutLink, runLink, setQuery, useRoute } from "./router";
import { failedPlugins, meanReward, type Cause, type Health, type Row, type RolloutPage, type Source, type Summary } from "./source";
import { VirtualTable, type Column } from "./table";
import { Block } from "./text";
import { parse, quoted, type Condition } from "./where";

const GROUPS = 50;
export const MASKED_SIGNS: Record<string, string> = { InfraFailed: "!", VerifierFailed: "?", Cancelled: "×" };

const COLUMNS: Column<Row>[] = [
  { name: "index", title: "#", right: true, meaning: "Number of the rollout", cell: (row) => row.index },
  { name: "task", title: "task", wide: true, cell: (row) => <span class="label" title={row.task}><Name text={row.task} />{row.dropped > 0 && <span class="badge" title="It wrote files that could change the verdict">cheat?</span>}</span> },
  { name: "member", title: "member", right: true, cell: (row) => row.member },
  { name: "reward", title: "reward", right: true, cell: (row) => <span class="chip" style={{ "--tone": tone(row) }}>{row.reward === undefined ? "–" : number(row.reward, 3)}</span> },
  { name: "ended", title: "ended", cell: (row) => row.ended },
  { name: "turns", title: "turns", right: true, cell: (row) => row.turns },
  { name: "tools", title: "tools", right: true, cell: (row) => row.tools },
  { name: "tokens", title: "tokens", right: true, cell: (row) => compact(row.tokens) },
  { name: "seconds", title: "time", right: true, cell: (row) => seconds(row.seconds) },
  { name: "message", title: "what happened", wide: true, cell: (row) => row.error ?? [row.reason, row.message].filter(Boolean).join(": ") },
];

export function Run({ source, run }: { source: Source; run: string }) {
  const { summary, problem } = useSummary(source, run);
  const { query } = useRoute();
  useTitle(summary?.name ?? run);
  const filter = query.get("where") ?? "", sort = query.get("sort") ?? "index", descending = query.get("order") === "descending";
  const [where, wrong] = useMemo<[Condition | null, string]>(() => {
    if (!summary) return [null, ""];
    try {
      return [parse(filter, summary.fields), ""];
    } catch (error) {
      return [null, (error as Error).message];
    }
  }, [filter, summary?.fields.length]);
  if (problem) return <>{source.isServer && <p><a href={href(["runs"])}>All runs</a></p>}<Problem text={problem} /></>;
  if (!summary) return <p role="status">Reading…</p>;
  const version = JSON.stringify([where, sort, descending, summary.read]);
  const link = (text: string) => runLink(run, { where: text });
  return (
    <>
      <Head summary={summary} source={source} />
      <Figures summary={summary} />
      {summary.health && <HealthLine health={summary.health} />}
      {summary.inFlight.count > 0 && <InFlight summary={summary} />}
      <div class="charts">
        <section class="card" aria-labelledby="ended-title">
          <h2 id="ended-title">How rollouts ended</h2>
          {summary.read === 0 && <p class="hint">No rollout has ended.</p>}
          <Bars link={link} rows={Object.entries(summary.ended).map(([name, amount]) => ({
            name, amount, where: `ended == ${quoted(name)}`,
            color: name in MASKED_SIGNS ? "var(--masked)" : name === "Finished" ? "var(--good)" : "var(--mid)",
          }))} />
        </section>
        <section class="card" aria-labelledby="rewards-title">
          <h2 id="rewards-title">Rewards</h2>
          {summary.histogram ? <Histogram histogram={summary.histogram} /> : <p class="hint">No rollout has a reward.</p>}
        </section>
        <section class="card" aria-labelledby="times-title">
          <h2 id="times-title">Where the time went</h2>
          {summary.parts.length > 0 ? <Parts parts={summary.parts} /> : <p class="hint">{summary.read === 0 ? "No rollout has ended." : "No rollout has got so far that its times are known."}</p>}
        </section>
      </div>
      {summary.labels.length > 1 && (
        <section class="card" aria-labelledby="curve-title">
          <h2 id="curve-title">Learning curve</h2>
          <p class="hint">Mean reward of the rollouts with each label, in the order of submission.</p>
          <div class="scroll" tabIndex={0} role="region" aria-label="Learning curve"><Curves curves={[{ name: summary.name, points: summary.labels }]} /></div>
        </section>
      )}
      {summary.causes.length > 0 && <Causes summary={summary} source={source} link={link} />}
      <section id="rollouts" aria-labelledby="rollouts-title">
        <h2 id="rollouts-title">Rollouts</h2>
        <Filter summary={summary} filter={filter} wrong={wrong} />
        <HeatMap source={source} run={run} where={where} read={summary.read} k={summary.k} filter={filter} />
        <VirtualTable<Row> label="Rollouts" columns={COLUMNS} sort={sort} descending={descending} version={version} where={filter}
          onSort={(name) => setQuery({ sort: name, order: name === sort && !descending ? "descending" : null })}
          fetchPage={(offset, limit) => source.rollouts(run, { where, sort, descending, offset, limit })}
          link={(row) => rolloutLink(run, row.index, { where: filter, sort: query.get("sort"), order: query.get("order") })} />
      </section>
    </>
  );
}

function Head({ summary, source }: { summary: Summary; source: Source }) {
  return (
    <header class="head">
      {source.isServer && <nav aria-label="Path"><a href={href(["runs"])}>Runs</a> ›</nav>}
      <h1>{summary.name} <State state={summary.state} /></h1>
      <p class="about">{[summary.mode, summary.model, summary.agent && `agent ${summary.agent}`, when(summary.started ?? summary.created), summary.uri].filter(Boolean).join("  ·  ")}</p>
      {summary.aborted && <Problem text={`This run was aborted: ${summary.aborted}`} />}
      {summary.error && <EndingError text={summary.error} />}
      {summary.problem && <Problem text={`Reading this run failed, and is tried again. ${summary.problem}`} />}
      {Object.entries(summary.damaged).slice(0, 10).map(([index, problem]) => <Problem text={`Rollout ${index} cannot be read: ${problem}`} />)}
      {summary.state === "unfinished" && (
        <p class="banner">No process works on this run. {count(summary.sealed)} of {count(summary.total)} rollouts have ended{summary.latest ? `, the last record is ${ago(summary.latest).replace(" ago", "")} old` : ""}. Run the same command again to resume it. <Resume summary={summary} /></p>
      )}
      {!source.isServer && summary.state !== "finished" && summary.total !== null && summary.sealed < summary.total && (
        <p class="banner">This run is not finished: {count(summary.sealed)} of {count(summary.total)} rollouts have ended.</p>
      )}
      {summary.forgeable > 0 && <p class="hint">{summary.forgeable === summary.sealed ? "All rewards" : plural(summary.forgeable, "reward")} could have been forged by the agents: <a href={runLink(summary.folder, { where: "forgeable == true" })}>which</a>. See verifier.mode and sandbox isolation in the manifest.</p>}
      {summary.isReading && <p class="hint" role="status">Reading… {count(summary.read)} of {count(summary.sealed)} rollouts so far.</p>}
    </header>
  );
}

/** The error that ended the run, with the traceback of an agent's own exception. */
function EndingError({ text }: { text: string }) {
  const [line, ...rest] = text.split("\n");
  return (
    <>
      <Problem text={`This run ended with an error: ${line}`} />
      {rest.length > 0 && <Block text={rest.join("\n")} label="details" error />}
    </>
  );
}

function Figures({ summary }: { summary: Summary }) {
  const { sealed, total } = summary;
  const wall = summary.started && summary.finished ? summary.finished - summary.started : null;
  return (
    <section aria-label="Figures">
      {total !== null && sealed < total && (
        <progress max={total} value={sealed} aria-label={`${count(sealed)} of ${count(total)} rollouts have ended`} />
      )}
      <Tiles tiles={[
        ["Mean reward", number(summary.mean, 3), summary.standardError === null ? `${count(summary.graded)} graded` : `± ${number(summary.standardError, 3)} (standard error), ${count(summary.graded)} graded`],
        ["pass@1", percent(summary.passAt1), "share that passed everything"],
        summary.k > 1 && [`pass@${summary.k}`, percent(summary.passAtK), `at least one of ${summary.k} passes`],
        ["Rollouts", total !== null && sealed < total ? `${count(sealed)} / ${count(total)}` : count(sealed), `${plural(total === null ? summary.groups : Math.ceil(total / summary.k), "task")} × ${summary.k}`],
        ["Masked", count(summary.masked), summary.lost ? `${plural(summary.lost, "lost attempt")}, repeated` : "excluded from training and means"],
        summary.cheats > 0 && ["Cheat attempts", count(summary.cheats), "files that could change the verdict"],
        ["Tokens", compact(summary.promptTokens + summary.completionTokens), `${compact(summary.completionTokens)} generated, ${compact(summary.cachedTokens)} from cache`],
        summary.cost !== null && ["Cost", money(summary.cost, summary.currency), "by the manifest's prices"],
        summary.state === "running" && summary.perMinute !== null && sealed < (total ?? Infinity)
          ? ["Rate", `${number(summary.perMinute, 1)} / min`, summary.secondsLeft !== null && `${seconds(summary.secondsLeft)} left`]
          : ["Wall time", seconds(wall), `${count(summary.turns)} turns, ${count(summary.tools)} tool calls`],
      ]} />
    </section>
  );
}

function HealthLine({ health }: { health: Health }) {
  const lost = Object.entries(health.lostAttempts).map(([reason, amount]) => `${reason} ×${count(amount)}`).join(", ");
  const sandboxes = Object.entries(health.sandboxes).map(([state, amount]) => `${count(amount)} ${state.toLowerCase()}`).join(", ");
  const troubles = [
    health.failingCalls > 0 && `${plural(health.failingCalls, "model call is", "model calls are")} being retried${health.callProblem ? `: ${health.callProblem}` : ""}`,
    health.silentSeconds > 0 && `${health.silentPlace ?? "the model"} has not answered for ${seconds(health.silentSeconds)}`,
    health.sandboxProblem,
    health.storageFailures > 0 && `${plural(health.storageFailures, "request")} to storage failed in the last minute`,
  ].filter(Boolean);
  return (
    <section aria-label="Health">
      {troubles.map((trouble) => <p class="banner">{trouble}</p>)}
      <p class="hint">{plural(health.processes, "process works", "processes work")} on this run. {troubles.length === 0 && "Model and storage answer. "}
        {plural(health.callRetries, "model call", "model calls")} retried{health.rateLimitedCalls > 0 && `, ${count(health.rateLimitedCalls)} of them because of status 429`}. {sandboxes && `Sandboxes: ${sandboxes}. `}
        {lost ? `Lost attempts: ${lost}.` : "No attempt was lost."}</p>
    </section>
  );
}

function InFlight({ summary }: { summary: Summary }) {
  const { count: amount, shown } = summary.inFlight;
  const isRunning = summary.state === "running";
  return (
    <section class="card" aria-labelledby="flight-title">
      <h2 id="flight-title">{isRunning ? "In flight" : "Interrupted"}: {count(amount)}</h2>
      <ul class="flight">{shown.map((rollout) => (
        <li key={rollout.index}><a href={rolloutLink(summary.folder, rollout.index)}>
          <span class="label"><Name text={rollout.task} />/{rollout.member}</span>
          <span>turn {rollout.turn}{rollout.attempt ? `, attempt ${rollout.attempt}` : ""}</span>
          <span class={`doing doing-${rollout.doing.split(/[ :]/)[0]}`}>{rollout.doing}</span>
          <span class="hint">{rollout.since ? `${seconds(Math.max(0, summary.time - rollout.since))}` : ""}</span>
        </a></li>
      ))}</ul>
      {amount > shown.length && <p class="hint">… and {count(amount - shown.length)} more.</p>}
    </section>
  );
}

const KINDS: Record<string, string> = {
  Masked: "lost or not gradable; excluded from training", Exception: "the agent's own code raised",
  Tool: "a tool's own code raised, and the model saw the error", Plugin: "a plugin's own code raised",
  Verifier: "the verifier raised or wrote no usable report; the reward counts", Stopped: "the policy ended so; the reward counts", Cheat: "left out of the grading",
};

const TRACEBACKS: Record<string, (result: NonNullable<RolloutPage["result"]>) => string | undefined> = {
  Exception: (result) => result.traceback,
  Tool: (result) => Object.values(result.toolTracebacks ?? {})[0],
  Plugin: (result) => { const report = failedPlugins(result)[0]?.[1]; return report?.traceback ?? report?.error; },
};

/** The traceback of a cause's first rollout, which is read when the reader opens it. */
function Traceback({ source, run, cause }: { source: Source; run: string; cause: Cause }) {
  const [isOpen, setOpen] = useState(false);
  const { value, problem } = useAsync(() => (isOpen ? source.rollout(run, cause.first) : Promise.resolve(null)), [source, run, cause.first, isOpen]);
  return (
    <details onToggle={(event) => setOpen(event.currentTarget.open)}><summary>Traceback of rollout {cause.first}</summary>
      {problem || value?.problem ? <Problem text={problem || value!.problem!} /> : value?.result && <Block text={TRACEBACKS[cause.kind]!(value.result) ?? "No traceback was recorded."} error folded={false} />}
    </details>
  );
}

function Causes({ summary, source, link }: { summary: Summary; source: Source; link: (where: string) => string }) {
  const [shown, setShown] = useState(8);
  return (
    <section class="card" aria-labelledby="causes-title">
      <h2 id="causes-title">What went wrong</h2>
      <ul class="causes">{summary.causes.slice(0, shown).map((cause) => (
        <li key={cause.where}>
          <span class="number">{count(cause.count)}</span>{" "}<a href={link(cause.where)}><strong>{cause.title}</strong></a>{" "}
          <span class="hint">{KINDS[cause.kind]}. First: <a href={rolloutLink(summary.folder, cause.first, { where: cause.where, tab: ["Plugin", "Verifier"].includes(cause.kind) ? "verdict" : null })}>rollout {cause.first}</a></span>
          {cause.message && <small class="why" title={cause.message}>{cause.message}</small>}
          {cause.kind in TRACEBACKS && <Traceback source={source} run={summary.folder} cause={cause} />}
        </li>
      ))}</ul>
      {summary.causes.length > shown && <button type="button" class="plain" onClick={() => setShown(shown + 50)}>Show {summary.causes.length - shown} more</button>}
    </section>
  );
}

function Filter({ summary, filter, wrong }: { summary: Summary; filter: string; wrong: string }) {
  const input = useRef<HTMLInputElement>(null);
  const [text, setText] = useState(filter);
  const timer = useRef<ReturnType<typeof setTimeout> | undefined>(undefined);
  useEffect(() => { if (document.activeElement !== input.current) setText(filter); }, [filter]);
  useKeys({ "/": () => { input.current?.focus(); input.current?.select(); } });
  const change = (next: string) => {
    setText(next);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => setQuery({ where: next || null }), 250);
  };
  return (
    <form class="filters" role="search" onSubmit={(event) => { event.preventDefault(); setQuery({ where: text || null }); }}>
      <label class="grow"><span>Filter</span>
        <input ref={input} type="search" id="filter" value={text} autocomplete="off" spellcheck={false} aria-invalid={Boolean(wrong)} aria-describedby="filter-note"
          placeholder={'reward < 0.5 and tag == "hard" and tools > 20, or words  ( / )'} onInput={(event) => change(event.currentTarget.value)} /></label>
      {filter && <button type="button" onClick={() => change("")}>Clear</button>}
      {filter && <Copy text={location.href} label="Copy link" />}
      <p id="filter-note" class={wrong ? "wrong" : "hint"} role="status">{wrong ? `${wrong}. All rollouts are shown.` : ""}</p>
      <details><summary>Fields</summary>
        <dl class="fields">{summary.fields.map((field) => <div><dt><code>{field.name}</code></dt><dd>{field.meaning}</dd></div>)}</dl>
        <p class="hint">Compare with <code>== != &lt; &lt;= &gt; &gt;=</code>, look for a part with <code>"text" in task</code>, combine with <code>and or not ( )</code>. <code>none</code> is a missing value.</p>
      </details>
    </form>
  );
}

function HeatMap({ source, run, where, read, k, filter }: { source: Source; run: string; where: Condition | null; read: number; k: number; filter: string }) {
  const [offset, setOffset] = useState(0);
  const [isWorst, setWorst] = useState(false);
  const key = JSON.stringify(where);
  useEffect(() => setOffset(0), [key, isWorst]);
  const { value, problem } = useAsync(() => source.groups(run, where, isWorst, offset, GROUPS), [source, run, key, isWorst, offset, read]);
  if (problem) return <Problem text={problem} />;
  if (!value || value.count === 0) return null;
  return (
    <div class="heat">
      <p class="hint">Each row is a task, each square a rollout. ⚑: files that could change the verdict; ! ? ×: masked.{" "}
        <label class="check"><input type="checkbox" checked={isWorst} onChange={(event) => setWorst(event.currentTarget.checked)} /> worst first</label>
      </p>
      <div class="scroll" tabIndex={0} role="region" aria-label="Tasks">
        <table id="groups"><tbody>{value.groups.map((members) => {
          const first = members[0]!;
          return (
            <tr key={first.group}>
              <th scope="row"><span class="label"><a class="label" href={runLink(run, { where: `group == ${first.group}` })} title={`Only rollouts of ${first.task}`}><Name text={first.task} /></a>
                {first.tag.map((tag) => <span class="tag">{tag}</span>)}</span></th>
              <td class="number">{number(meanReward(members), 2)}</td>
              <td class="cells">{members.map((row) => {
                const told = `rollout ${row.index}, member ${row.member}: ${row.ended}, ${row.reward === undefined ? "no reward" : `reward ${number(row.reward, 3)}`}${row.dropped ? ", files that could change the verdict" : ""}`;
                return (
                  <a key={row.index} class="cell" style={{ "--tone": tone(row) }} title={told} aria-label={told} href={rolloutLink(run, row.index, { where: filter })}>
                    {MASKED_SIGNS[row.outcome] ?? (row.reward === undefined ? "" : number(row.reward, 1))}{row.dropped > 0 && " ⚑"}
                  </a>
                );
              })}{k > members.length && filter === "" && Array.from({ length: Math.min(k - members.length, 64) }, () => <span class="cell empty" aria-hidden="true" />)}</td>
            </tr>
          );
        })}</tbody></table>
      </div>
      {value.count > GROUPS && (
        <p class="pager">
          <button type="button" disabled={offset === 0} onClick={() => setOffset(Math.max(0, offset - GROUPS))}>‹ Previous tasks</button>
          <span>{count(offset + 1)} to {count(Math.min(offset + GROUPS, value.count))} of {count(value.count)}</span>
          <button type="button" disabled={offset + GROUPS >= value.count} onClick={() => setOffset(offset + GROUPS)}>Next tasks ›</button>
        </p>
      )}
    </div>
  );
}
