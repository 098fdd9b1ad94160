import { useMemo, useRef, useState } from "preact/hooks";
import { tone } from "./charts";
import { bytes, compact, count, number, plural, seconds } from "./format";
import { Copy, Problem, Resume, Tiles, useAsync, useFollowed, useKeys, useSummary, useTitle } from "./parts";
import { href, parseHash, rolloutLink, runLink, setQuery, useRoute } from "./router";
import { failedPlugins, type Call, type RolloutPage, type Source, type Span, type Step, type Strip, type Summary, type Verdict } from "./source";
import { Block, Marked, MessageText, Search } from "./text";
import { parse } from "./where";

const TABS = ["transcript", "verdict", "files", "tokens", "facts"] as const;
type Tab = (typeof TABS)[number];

export function Rollout({ source, run, index }: { source: Source; run: string; index: number }) {
  const { summary } = useSummary(source, run);
  const { query } = useRoute();
  const isRunning = source.isServer && summary?.state === "running";
  const isUnderWay = (page: RolloutPage | null) => page !== null && !page.problem && page.result === null && isRunning;
  // Read again when the run ends: the rollout may have ended with it.
  const { value: page, problem } = useFollowed(() => source.rollout(run, index), [source, run, index, isRunning], isUnderWay);
  const tab = (TABS as readonly string[]).includes(query.get("tab") ?? "") ? (query.get("tab") as Tab) : "transcript";
  const [words, setWords] = useState("");
  useNeighbours(source, run, index, summary);
  useTitle(`Rollout ${index} of ${summary?.name ?? run}`);
  const back = runLink(run, kept());
  return (
    <>
      <header class="head">
        <nav aria-label="Path">{source.isServer && <><a href={href(["runs"])}>Runs</a> › </>}<a href={back}>{summary?.name ?? run}</a> ›</nav>
        <h1>Rollout {index}{page?.task ? `: ${page.task}, member ${page.member}` : ""}</h1>
      </header>
      {(problem || page?.problem) && <Problem text={problem || page!.problem!} />}
      {!page && !problem && <p role="status">Reading…</p>}
      {page && !page.problem && (
        <>
          <Facts page={page} summary={summary} />
          <Timeline spans={page.timeline} />
          <div class="filters">
            <div role="group" aria-label="Parts of the rollout" class="tabs">{TABS.filter((name) => source.isServer || !["files", "tokens"].includes(name)).map((name) => (
              <button type="button" aria-pressed={tab === name} onClick={() => setQuery({ tab: name === "transcript" ? null : name })}>{name}</button>
            ))}</div>
            <label class="grow"><span>Search</span>
              <input type="search" id="filter" value={words} placeholder="in this rollout  ( / )" autocomplete="off" spellcheck={false} onInput={(event) => setWords(event.currentTarget.value)} /></label>
            <Commands page={page} run={run} index={index} summary={summary} source={source} />
          </div>
          <Search.Provider value={words.trim().toLowerCase()}>
            {tab === "transcript" && <Transcript page={page} source={source} run={run} index={index} summary={summary} isLive={isUnderWay(page)} words={words.trim().toLowerCase()} />}
            {tab === "verdict" && <VerdictPart page={page} />}
            {tab === "files" && <Files source={source} run={run} index={index} />}
            {tab === "tokens" && <Tokens source={source} run={run} index={index} advantage={page.advantage} />}
            {tab === "facts" && <Block folded={false} label="The result, as recorded" text={JSON.stringify(page.result, null, 2)} />}
          </Search.Provider>
        </>
      )}
    </>
  );
}

/** The query of the list that the reader came from. */
function kept(): Record<string, string | null> {
  const { query } = parseHash(location.hash);
  return { where: query.get("where"), sort: query.get("sort"), order: query.get("order") };
}

/** j and k: the next and the previous rollout of the list that the reader came from. */
function useNeighbours(source: Source, run: string, index: number, summary: Summary | null) {
  const go = async (step: 1 | -1) => {
    const list = kept(), sort = list.sort ?? "index", descending = list.order === "descending";
    let where = null;
    try { where = parse(list.where ?? "", summary?.fields ?? []); } catch { /* the list shows all rollouts then */ }
    const PAGE = 500;
    let last: number | null = null;
    for (let offset = 0; ; offset += PAGE) {
      const { rows } = await source.rollouts(run, { where, sort, descending, offset, limit: PAGE });
      for (const [at, row] of rows.entries()) {
        if (row.index === index) {
          const next = step < 0 ? last : (rows[at + 1]?.index ?? (rows.length === PAGE ? (await source.rollouts(run, { where, sort, descending, offset: offset + PAGE, limit: 1 })).rows[0]?.index : undefined));
          if (next !== undefined && next !== null) location.hash = rolloutLink(run, next, { ...list, tab: parseHash(location.hash).query.get("tab") });
          return;
        }
        last = row.index;
      }
      if (rows.length < PAGE) return;
    }
  };
  useKeys({ j: () => void go(1), k: () => void go(-1), u: () => { location.hash = runLink(run, kept()); } });
}

function Facts({ page, summary }: { page: RolloutPage; summary: Summary | null }) {
  const { result } = page;
  if (!result) return <Unfinished summary={summary} />;
  const parts = result.seconds ?? {};
  const ended = result.outcome === "Completed" ? (result.stopReason ?? "Completed") : result.outcome;
  return (
    <>
      <Tiles tiles={[
        ["Reward", <span class="chip" style={{ "--tone": tone({ outcome: result.outcome, reward: result.reward }) }}>{number(result.reward, 3)}</span>, page.verdict ? (page.verdict.passed ? "passed" : "not passed") : "not graded"],
        ["Ended", ended, result.outcome === "Completed" ? undefined : `masked: ${result.reason ?? ""}`],
        page.advantage !== null && ["Advantage", number(page.advantage, 3)],
        ["Turns", count(result.turns ?? 0), plural(result.toolCalls ?? 0, "tool call")],
        ["Tokens", compact((result.usage?.promptTokens ?? 0) + (result.usage?.completionTokens ?? 0)), `${compact(result.usage?.completionTokens ?? 0)} generated`],
        ["Time", seconds(parts.total), ["model", "tools", "verifier"].filter((name) => parts[name]).map((name) => `${name} ${seconds(parts[name])}`).join(", ")],
      ]} />
      {result.message && (result.stopReason === "Finished" ? <Block text={result.message} label="Final message" /> : <Told what={result.reason ?? ""} text={result.message} />)}
      {result.failedAttempts?.map((attempt) => <Told what={`Attempt ${attempt.attempt} was lost: ${attempt.reason}`} text={attempt.message ?? ""} />)}
      {result.traceback && <Block text={result.traceback} label="The agent's own code raised" error />}
    </>
  );
}

/** A message, which may be a traceback of several lines. */
function Told({ what, text }: { what: string; text: string }) {
  if (text.includes("\n")) return <Block text={text} label={what} error />;
  return <p class="banner">{[what, text].filter(Boolean).join(": ")}</p>;
}

function Unfinished({ summary }: { summary: Summary | null }) {
  if (!summary) return null;
  if (summary.state === "running") return <p class="banner">This rollout is in flight. It has no result yet.</p>;
  if (summary.state === "unfinished") return <p class="banner">This rollout was interrupted, because no process works on the run. It continues when the run is resumed. <Resume summary={summary} /></p>;
  return <p class="banner">This rollout has no result: the run ended before it.</p>;
}

function Timeline({ spans }: { spans: Span[] }) {
  if (spans.length === 0) return null;
  const start = Math.min(...spans.map((span) => span.start)), end = Math.max(...spans.map((span) => span.end)), whole = Math.max(end - start, 1e-3);
  const sums = new Map<string, number>();
  for (const span of spans) sums.set(span.kind, (sums.get(span.kind) ?? 0) + span.end - span.start);
  const told = [...sums].map(([kind, sum]) => `${kind} ${seconds(sum)}`).join(", ");
  return (
    <section class="timeline" aria-label={`Timeline of ${seconds(whole)}: ${told}`}>
      <div class="lane">{spans.map((span) => (
        <button type="button" class={`span span-${span.kind}`} tabIndex={-1} aria-hidden="true"
          style={{ left: `${(100 * (span.start - start)) / whole}%`, width: `max(2px, ${(100 * (span.end - span.start)) / whole}%)` }}
          title={`${span.kind}${span.name ? ` ${span.name}` : ""}${span.turn === undefined ? "" : `, turn ${span.turn + 1}`}: ${seconds(span.end - span.start)}, ${seconds(span.start - start)} after the start`}
          onClick={() => span.turn !== undefined && jump(`turn-${span.turn}`)} />
      ))}</div>
      <p class="hint">{[...sums].map(([kind, sum]) => <span class={`legend span-${kind}`}>{kind} {seconds(sum)}</span>)}<span>of {seconds(whole)}; the rest is waiting and the agent's own time</span></p>
    </section>
  );
}

function jump(id: string) {
  const element = document.getElementById(id);
  element?.scrollIntoView({ block: "start" });
  element?.focus({ preventScroll: true });
}

const hasError = (step: Step) => step.calls?.some((call) => call.error) ?? false;

function Transcript({ page, source, run, index, summary, isLive, words }: { page: RolloutPage; source: Source; run: string; index: number; summary: Summary | null; isLive: boolean; words: string }) {
  const [isPlain, setPlain] = useState(false);
  const found = useMemo(() => (words ? page.steps.filter((step) => JSON.stringify(step).toLowerCase().includes(words)).length : 0), [words, page]);
  const at = useRef(-1);
  const turns = page.steps.flatMap((step, number) => (isAnswer(step) ? [number] : []));
  const move = (step: 1 | -1) => {
    at.current = Math.max(0, Math.min(turns.length - 1, at.current + step));
    jump(`step-${turns[at.current]}`);
  };
  // A job refuses to branch at the last answer, which has no later turn to continue with.
  const branch = (step: Step, number: number) =>
    summary?.canBranch && turns.includes(number) && number !== turns[turns.length - 1]
      ? `# In a manifest: continue after turn ${step.turn! + 1} of this rollout, four times.\ntasks:\n  branch:\n    - {job: ${JSON.stringify(summary.uri)}, index: ${index}, turn: ${step.turn}, count: 4}\n` : undefined;
  const isCalling = isLive && page.doing?.doing.startsWith("tool ");
  const firstError = page.steps.findIndex(hasError);
  useKeys({
    n: () => move(1), p: () => move(-1), v: () => setQuery({ tab: "verdict" }),
    e: () => { if (firstError >= 0) jump(`step-${firstError}`); },
  });
  return (
    <div class="reading">
      <nav class="outline" aria-label="Turns">
        <p><label class="check"><input type="checkbox" checked={isPlain} onChange={(event) => setPlain(event.currentTarget.checked)} /> as plain text</label></p>
        <p class="jumps">
          {firstError >= 0 && <button type="button" onClick={() => jump(`step-${firstError}`)}>First error</button>}
          {page.verdict && <button type="button" onClick={() => setQuery({ tab: "verdict" })}>Verdict</button>}
        </p>
        {words && <p class="hint" role="status">{plural(found, "step has", "steps have")} “{words}”</p>}
        <ol>{page.steps.map((step, number) => (
          <li key={number}><a href={location.hash} class={hasError(step) ? "bad" : undefined} onClick={(event) => { event.preventDefault(); at.current = turns.indexOf(number); jump(`step-${number}`); }}>{outlined(step)}</a></li>
        ))}</ol>
      </nav>
      <div class="steps">
        {page.steps.map((step, number) => <StepCard key={number} step={step} id={`step-${number}`} isPlain={isPlain} branch={branch(step, number)} callingSince={isCalling && number === turns[turns.length - 1] ? page.doing!.since : null} raw={source.isServer && isAnswer(step) ? () => source.raw(run, index, step.turn!) : undefined} />)}
        {isLive && <p class="hint" role="status">In flight, turn {page.doing?.turn}: {page.doing?.doing}{page.doing?.since ? ` for ${since(page.doing.since)}` : ""}. New steps appear as they are recorded.</p>}
      </div>
    </div>
  );
}

const since = (unix: number) => seconds(Math.max(0, Date.now() / 1000 - unix));
const isAnswer = (step: Step) => step.role === "assistant" && step.turn !== undefined && step.turn !== null;

function outlined(step: Step): string {
  if (!isAnswer(step)) return step.role === "note" ? (step.text ?? "").slice(0, 40) : step.role;
  const tools = [...new Set((step.calls ?? []).map((call) => call.name))].join(", ");
  return `${step.turn! + 1}  ${tools || (step.text ?? "").slice(0, 40) || "empty answer"}`;
}

function StepCard({ step, id, isPlain, branch, callingSince, raw }: { step: Step; id: string; isPlain: boolean; branch?: string; callingSince: number | null; raw?: () => Promise<{ text: string; isWhole: boolean }> }) {
  const [shown, setShown] = useState<{ text: string; isWhole: boolean } | null>(null);
  const [problem, setProblem] = useState("");
  if (step.role === "note") return <p class="note" id={id} tabIndex={-1}><Marked text={step.text ?? ""} /></p>;
  return (
    <article class={`step role-${step.role}`} id={id} tabIndex={-1}>
      <header id={isAnswer(step) ? `turn-${step.turn}` : undefined} tabIndex={-1}>
        <strong>{isAnswer(step) ? `assistant, turn ${step.turn! + 1}` : step.role}</strong>
        {isAnswer(step) && <span class="hint">{seconds(step.seconds ?? 0)}, {count(step.tokens?.[0] ?? 0)} + {plural(step.tokens?.[1] ?? 0, "token")}</span>}
        {branch && <Copy text={branch} label="Copy: branch from here" isPlain />}
        {raw && <button type="button" class="plain" aria-expanded={shown !== null} onClick={() => {
          if (shown) setShown(null);
          else raw().then(setShown, (error: Error) => setProblem(error.message));
        }}>{shown ? "hide raw" : "raw"}</button>}
      </header>
      {problem && <Problem text={problem} />}
      {shown && <Block label={shown.isWhole ? "Request and answer, as recorded" : "The beginning of the request and answer, as recorded"} text={shown.text} folded={false} />}
      {step.reasoning && <details class="reasoning" open><summary>reasoning</summary><MessageText role={step.role} text={step.reasoning} isPlain={isPlain} /></details>}
      {step.text ? <MessageText role={step.role} text={step.text} isPlain={isPlain} /> : isAnswer(step) && !step.calls?.length && !step.reasoning && <p class="hint">The answer is empty.</p>}
      {step.calls?.map((call) => <CallPart call={call} callingSince={callingSince} />)}
    </article>
  );
}

export function CallPart({ call, callingSince }: { call: Call; callingSince: number | null }) {
  return (
    <div class="call">
      <p class="call-head"><span aria-hidden="true">→ </span><strong><Marked text={call.name} /></strong>{call.seconds ? <span class="hint"> {seconds(call.seconds)}</span> : null}{call.error && <span class="badge bad">error</span>}</p>
      {call.arguments?.map(([name, value]) => <Block text={value} label={name || "arguments"} />)}
      {call.diff && <Block text={call.diff} label="change" />}
      {call.result === undefined || call.result === null
        ? <p class="hint">{callingSince === null ? "No result was recorded." : `Running for ${since(callingSince)}.`}</p>
        : <Block text={call.result || "(empty)"} label="result" error={call.error} />}
      {call.traceback && <Block text={call.traceback} label="The tool's own code raised" error />}
    </div>
  );
}

function VerdictPart({ page }: { page: RolloutPage }) {
  const { verdict } = page;
  return (
    <section aria-label="Verdict">
      {!verdict ? <p class="banner">This rollout was not graded.</p> : <VerdictOf verdict={verdict} />}
      {page.result && failedPlugins(page.result).map(([name, { failed, error, traceback }]) => <Block label={`plugin ${name}: ${plural(failed!, "call")} failed, first with`} text={[error, traceback].filter(Boolean).join("\n\n")} error />)}
      {Object.entries(page.result?.plugins ?? {}).map(([name, { error, traceback, ...report }]) => <Block label={`plugin ${name}`} text={JSON.stringify(report, null, 2)} />)}
    </section>
  );
}

function VerdictOf({ verdict }: { verdict: Verdict }) {
  const tests = verdict.tests ?? [], failed = tests.filter((test) => !test.passed);
  return (
    <>
      <p><strong class={verdict.passed ? "good" : "bad"}>{verdict.passed ? "Passed" : "Not passed"}, reward {number(verdict.reward, 3)}</strong>
        {Object.entries(verdict.rewards ?? {}).map(([name, value]) => <span class="tag">{name} {number(value, 3)}</span>)}
        {verdict.mode && <span class="tag">{verdict.mode}</span>}</p>
      {verdict.message && <p class="banner"><Marked text={verdict.message} /></p>}
      {verdict.forgeable && <p class="banner">The graded code could have changed this verdict (see verifier.mode).</p>}
      {verdict.dropped && verdict.dropped.length > 0 && <Block label="Not carried into the grading, because these files could change the verdict" text={verdict.dropped.join("\n")} />}
      {tests.length > 0 && <p>{count(tests.length - failed.length)} of {plural(tests.length, "test")} passed.</p>}
      {failed.map((test) => <Block label={`✗ ${test.name}`} text={test.message || "(no message)"} error />)}
      {verdict.commands?.map((command) => (
        <Block label={`$ ${command.command}   (${command.cause ? `ended by ${command.cause}` : `exit ${command.exitCode}`}, ${seconds(command.seconds)})`} text={command.output || "(no output)"} error={command.exitCode !== 0} />
      ))}
    </>
  );
}

function Files({ source, run, index }: { source: Source; run: string; index: number }) {
  const { value, problem } = useAsync(() => source.files(run, index), [source, run, index]);
  const { query } = useRoute();
  const path = query.get("file");
  const content = useAsync(() => (path ? source.file(run, index, path) : Promise.resolve(null)), [source, run, index, path]);
  if (problem) return <Problem text={problem} />;
  if (!value) return <p role="status">Reading…</p>;
  if (value.length === 0) return <p class="banner">This rollout stored no files: it was graded in place, or has no verifier.</p>;
  return (
    <div class="reading">
      <nav class="outline" aria-label="Files"><p class="hint">What the agent left for the grading.</p>
        <ul>{value.map((entry) => (
          <li key={entry.path}>{entry.kind === "file" || entry.kind === "deleted"
            ? <a href={rolloutLink(run, index, { ...kept(), tab: "files", file: entry.path })} aria-current={entry.path === path ? "true" : undefined}><code>{entry.path}</code>{entry.kind === "deleted"
              ? <span class="tag">deleted</span>
              : <><span class="hint"> {bytes(entry.bytes)}</span>{entry.change && <span class="tag">{entry.change}</span>}</>}</a>
            : <span><code>{entry.path}</code> <span class="hint">{entry.kind}</span></span>}</li>
        ))}</ul></nav>
      <div class="steps">
        {content.problem && <Problem text={content.problem} />}
        {!path && <p class="hint">Choose a file.</p>}
        {content.value?.diff && <Block label={`Changes to ${path}`} text={content.value.diff} folded={false} />}
        {content.value && (content.value.text === null
          ? !content.value.diff && <p class="banner">This file is not text ({bytes(content.value.bytes)}).</p>
          : <Block label={`${path}, ${bytes(content.value.bytes)}${content.value.isWhole ? "" : ", only its beginning"}`} text={content.value.text} folded={content.value.diff !== null} />)}
      </div>
    </div>
  );
}

function Tokens({ source, run, index, advantage }: { source: Source; run: string; index: number; advantage: number | null }) {
  const { value, problem } = useAsync(() => source.tokens(run, index), [source, run, index]);
  if (problem) return <Problem text={problem} />;
  if (!value) return <p role="status">Reading…</p>;
  if (value.length === 0) return <p class="banner">No token ids were recorded: the model server returned none.</p>;
  return (
    <section aria-label="Tokens">
      <p class="hint">{value.some((strip) => strip.spans.some((span) => span.texts.length > 0)) ? "Text of the ids that the server sampled." : "Ids as the server sampled them; rolloutctl view --tokenizer shows their text."} The darker a token, the less probable it was. Only sampled tokens of a known policy are trained on.{advantage !== null && ` Each gets the advantage ${number(advantage, 3)}.`}</p>
      {value.map((strip, number) => <StripOf strip={strip} title={value.length > 1 ? `Branch ${number}` : "Tokens"} />)}
    </section>
  );
}

function StripOf({ strip, title }: { strip: Strip; title: string }) {
  return (
    <div class="card"><h2>{title}: {count(strip.tokens)}</h2>
      <p class="strip">{strip.spans.map((span) => span.mask === 0
        ? <span class="context" title={span.policy === null ? "context, not trained on" : `policy ${span.policy}`}>{plural(span.count, "token")} of context</span>
        : <span class="sampled" title={`policy ${span.policy ?? "unknown"}`}>
            {span.policy !== null && <span class="tag">policy {span.policy}</span>}
            {span.ids.map((id, at) => {
              const logprob = span.logprobs[at];
              return <span class="token" style={{ "--doubt": logprob === null || logprob === undefined ? 0 : Math.min(1, -logprob / 4) }} title={`token ${id}${logprob === null || logprob === undefined ? "" : `, logprob ${number(logprob, 4)}`}`}>{span.texts[at]?.replaceAll("\n", "⏎\n") ?? id}</span>;
            })}
            {span.ids.length < span.count && <span class="context">… {count(span.count - span.ids.length)} more</span>}
          </span>)}</p>
    </div>
  );
}

function Commands({ page, run, index, summary, source }: { page: RolloutPage; run: string; index: number; summary: Summary | null; source: Source }) {
  const { uri } = summary ?? { uri: run };
  const quotedUri = /^[\w@%+=:,./-]+$/.test(uri) ? uri : `'${uri.replaceAll("'", `'\\''`)}'`;
  return (
    <>
      <Copy label="Copy: show" text={`rolloutctl show ${quotedUri} ${index}`} />
      {source.isServer && summary && <a class="button" href={href(["compare", run, index, run, neighbour(page, index, summary.k)])}>Compare with another</a>}
    </>
  );
}

/** Another member of the same group; the rollout itself if its group has no other. */
const neighbour = (page: RolloutPage, index: number, k: number) => (page.member > 0 ? index - 1 : k > 1 ? index + 1 : index);
