import { useState } from "preact/hooks";
import { Curves } from "./charts";
import { count, number, plural, seconds } from "./format";
import { Problem, Tiles, useAsync, useFollowed, useSummary, useTitle } from "./parts";
import { CallPart } from "./rollout";
import { href, rolloutLink, runLink, useRoute, setQuery } from "./router";
import type { Source, Step } from "./source";
import { Block, MessageText } from "./text";
import { quoted } from "./where";

const MOST = 500; // rollouts of one task that can be chosen from
const signed = (value: number, digits = 3) => (value > 0 ? `+${number(value, digits)}` : number(value, digits));

export function CompareRuns({ source, before, after }: { source: Source; before: string; after: string }) {
  const first = useSummary(source, before).summary, second = useSummary(source, after).summary;
  const { query } = useRoute();
  const show = query.get("show") ?? "changed";
  const isLive = [first, second].some((run) => run?.state === "running");
  const { value, problem } = useFollowed(() => source.compare(before, after, show), [source, before, after, show, first?.state, second?.state], () => isLive);
  useTitle(`${before} and ${after}`);
  const head = (
    <header class="head">
      <nav aria-label="Path"><a href={href(["runs"])}>Runs</a> ›</nav>
      <h1>Compare</h1>
      <p class="about"><a href={runLink(before)}>{before}</a> → <a href={runLink(after)}>{after}</a>{"  ·  "}<a href={href(["compare", after, before])}>the other way round</a></p>
    </header>
  );
  if (problem) return <>{head}<Problem text={problem} /></>;
  if (!value) return <>{head}<p role="status">Reading…</p></>;
  const { counts } = value;
  const listed = value.tasks.map((row) => ({ ...row, change: row.after - row.before }));
  const areEqual = counts.all > 0 && counts.changed === 0;
  const more = (counts[show as keyof typeof counts] ?? 0) - listed.length;
  const interval = value.confidenceInterval;
  const curves = [first, second].flatMap((run) => (run && run.labels.length > 1 ? [{ name: run.folder, points: run.labels }] : []));
  return (
    <>
      {head}
      <Tiles tiles={[
        ["Mean reward", `${number(value.meanBefore, 3)} → ${number(value.meanAfter, 3)}`, `over ${plural(counts.all, "common task")}`],
        ["Difference", value.difference === null ? "–" : signed(value.difference), areEqual ? "all tasks are equal" : interval ? `95 % interval ${signed(interval[0])} to ${signed(interval[1])}${interval[0] > 0 || interval[1] < 0 ? "" : ": may be chance"}` : "too few tasks for an interval"],
        ["Better", count(counts.better)], ["Worse", count(counts.worse)], ["Equal", count(counts.all - counts.changed)],
        value.onlyBefore + value.onlyAfter > 0 && ["In one run only", count(value.onlyBefore + value.onlyAfter)],
      ]} />
      {curves.length > 0 && <section class="card" aria-labelledby="curves-title"><h2 id="curves-title">Learning curves</h2>
        <p>{curves.map((curve, i) => <span class={`legend curve-${i}`}>{curve.name}</span>)}</p>
        <div class="scroll" tabIndex={0} role="region" aria-label="Learning curves"><Curves curves={curves} /></div></section>}
      <section aria-labelledby="tasks-title"><h2 id="tasks-title">Tasks</h2>
        <div role="group" aria-label="Which tasks" class="tabs">{["changed", "worse", "better", "all"].map((name) => (
          <button type="button" aria-pressed={show === name} onClick={() => setQuery({ show: name === "changed" ? null : name })}>{name}</button>
        ))}</div>
        {listed.length === 0 ? <p class="hint">{areEqual && show === "changed" ? "All tasks are equal." : "No task."}</p> : (
          <div class="scroll" tabIndex={0} role="region" aria-label="Tasks">
            <table id="tasks"><thead><tr><th scope="col">task</th><th scope="col" class="number">before</th><th scope="col" class="number">after</th><th scope="col" class="number">difference</th></tr></thead>
              <tbody>{listed.map((row) => (
                <tr key={row.task}><td>{row.task}</td>
                  <td class="number"><a href={runLink(before, { where: `task == ${quoted(row.task)}` })}>{number(row.before, 3)}</a></td>
                  <td class="number"><a href={runLink(after, { where: `task == ${quoted(row.task)}` })}>{number(row.after, 3)}</a></td>
                  <td class={`number ${row.change > 0 ? "good" : row.change < 0 ? "bad" : ""}`}>{signed(row.change)}</td></tr>
              ))}</tbody></table>
          </div>
        )}
        {more > 0 && <p class="hint">… and {count(more)} more; rolloutctl diff -o json has all.</p>}
      </section>
      <section aria-labelledby="manifest-title"><h2 id="manifest-title">Manifest</h2>
        {value.manifest.length === 0 ? <p class="hint">The manifests are equal.</p> : <Block text={value.manifest.join("\n")} label="Changes" folded={false} />}
      </section>
    </>
  );
}

type Place = [run: string, index: number];

export function CompareRollouts({ source, before, after }: { source: Source; before: Place; after: Place }) {
  const one = useAsync(() => source.rollout(...before), [source, ...before]), two = useAsync(() => source.rollout(...after), [source, ...after]);
  useTitle(`Rollouts ${before[1]} and ${after[1]}`);
  const problem = one.problem || two.problem;
  const [left, right] = [rows(one.value?.steps ?? []), rows(two.value?.steps ?? [])];
  const turns = [...new Set([...left.keys(), ...right.keys()])].sort((a, b) => a - b);
  const different = turns.find((turn) => JSON.stringify(said(left.get(turn))) !== JSON.stringify(said(right.get(turn))));
  const title = ([run, index]: Place, found: typeof one) => (
    <><a href={rolloutLink(run, index)}>Rollout {index}</a> {found.value && <span class="hint">{found.value.task}/{found.value.member}, {found.value.result ? `reward ${number(found.value.result.reward, 3)}` : "no result"}{before[0] === after[0] ? "" : ` · ${run}`}</span>}</>
  );
  return (
    <>
      <header class="head"><nav aria-label="Path"><a href={runLink(before[0])}>{before[0]}</a> ›</nav><h1>Two rollouts, turn by turn</h1></header>
      {problem && <Problem text={problem} />}
      <div class="pair">
        <Picker key={`left ${before[0]}`} source={source} label="Left" place={before} task={one.value?.task ?? ""} link={(place) => href(["compare", ...place, ...after])} />
        <Picker key={`right ${after[0]}`} source={source} label="Right" place={after} task={one.value?.task ?? ""} link={(place) => href(["compare", ...before, ...place])} />
      </div>
      {before[0] === after[0] && before[1] === after[1] && <p class="banner">Both sides show the same rollout. Choose another one.</p>}
      {different !== undefined && <p class="hint">They differ from {different < 0 ? "the prompt" : `turn ${different + 1}`} on. <button type="button" class="plain" onClick={() => document.getElementById(`pair-${different}`)?.scrollIntoView()}>Go there</button></p>}
      <div class="pair pair-head"><h2>{title(before, one)}</h2><h2>{title(after, two)}</h2></div>
      {turns.map((turn) => (
        <section class="pair" id={`pair-${turn}`} aria-label={turn < 0 ? "Prompt" : `Turn ${turn + 1}`}>
          <Side steps={left.get(turn)} turn={turn} /><Side steps={right.get(turn)} turn={turn} />
        </section>
      ))}
    </>
  );
}

/** Chooses a rollout: a run, and in it one of the same task, or any by its number. */
function Picker({ source, label, place, task, link }: { source: Source; label: string; place: Place; task: string; link: (place: Place) => string }) {
  const [run, setRun] = useState(place[0]);
  const runs = useAsync(() => source.runs(), [source]);
  const found = useAsync(() => source.rollouts(run, { where: { op: "==", field: "task", value: task }, sort: "index", descending: false, offset: 0, limit: MOST }), [source, run, task]);
  const listed = found.value?.rows ?? [], problem = runs.problem || found.problem;
  const go = (index: number) => { location.hash = link([run, index]); };
  return (
    <form class="filters" aria-label={`${label} rollout`} onSubmit={(event) => { event.preventDefault(); go(Number(new FormData(event.currentTarget).get("index"))); }}>
      <label class="grow"><span>{label}: run</span>
        <select value={run} onChange={(event) => setRun(event.currentTarget.value)}>
          {[...new Set([run, ...(runs.value?.runs ?? []).map((other) => other.folder)])].map((folder) => <option key={folder} value={folder}>{folder}</option>)}
        </select></label>
      <label class="grow"><span>Rollout of {task || "the same task"}</span>
        <select value={run === place[0] && listed.some((row) => row.index === place[1]) ? String(place[1]) : ""} onChange={(event) => go(Number(event.currentTarget.value))}>
          <option value="" disabled>{listed.length ? "Choose…" : "No rollout of this task has ended."}</option>
          {listed.map((row) => <option key={row.index} value={String(row.index)}>{row.index}: member {row.member}, {row.ended}, {row.reward === undefined ? "no reward" : `reward ${number(row.reward, 3)}`}</option>)}
        </select></label>
      <label><span>or any number</span><input type="number" name="index" min={0} required size={6} /></label>
      <button type="submit">Show</button>
      {problem && <Problem text={problem} />}
    </form>
  );
}

/** Steps by the turn that they belong to; those before the first answer have turn -1. */
function rows(steps: Step[]): Map<number, Step[]> {
  const found = new Map<number, Step[]>();
  let turn = -1;
  for (const step of steps) {
    if (step.role === "assistant" && step.turn !== undefined && step.turn !== null) turn = step.turn;
    found.set(turn, [...(found.get(turn) ?? []), step]);
  }
  return found;
}

const said = (steps: Step[] | undefined) => steps?.map((step) => [step.role, step.text, step.calls?.map((call) => [call.name, call.arguments])]);

function Side({ steps, turn }: { steps: Step[] | undefined; turn: number }) {
  if (!steps) return <div class="side empty"><p class="hint">No turn {turn + 1}.</p></div>;
  return (
    <div class="side">{steps.map((step) => step.role === "note" ? <p class="note">{step.text}</p> : (
      <article class={`step role-${step.role}`}>
        <header><strong>{step.role === "assistant" ? `assistant, turn ${turn + 1}` : step.role}</strong>{step.seconds ? <span class="hint">{seconds(step.seconds)}</span> : null}</header>
        {step.text && <MessageText role={step.role} text={step.text} />}
        {step.calls?.map((call) => <CallPart call={call} callingSince={null} />)}
      </article>
    ))}</div>
  );
}
