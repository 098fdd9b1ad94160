import { useState } from "preact/hooks";
import { ago, compact, count, money, number, percent, plural, seconds, when } from "./format";
import { Problem, State, useFollowed, useTitle } from "./parts";
import { href, runLink } from "./router";
import type { Source } from "./source";

export function Runs({ source }: { source: Source }) {
  const [words, setWords] = useState("");
  const [ticked, setTicked] = useState<string[]>([]);
  const { value, problem } = useFollowed(() => source.runs(), [source], () => true);
  useTitle("Runs");
  if (problem) return <Problem text={problem} />;
  if (!value) return <p role="status">Reading…</p>;
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = value.runs.filter((run) => wanted.every((word) => `${run.folder} ${run.model} ${run.mode} ${run.agent} ${run.state}`.toLowerCase().includes(word)));
  const tick = (folder: string) => setTicked((now) => (now.includes(folder) ? now.filter((other) => other !== folder) : [...now, folder].slice(-2)));
  // The earlier run is the one that the later one is compared with.
  const pair = value.runs.filter((run) => ticked.includes(run.folder)).map((run) => run.folder).reverse();
  return (
    <>
      <h1>Runs</h1>
      <p class="about">{value.uri}</p>
      <form class="filters" role="search" onSubmit={(event) => event.preventDefault()}>
        <label class="grow"><span>Find</span>
          <input type="search" id="filter" value={words} placeholder="name, model, state  ( / )" autocomplete="off" spellcheck={false}
            onInput={(event) => setWords(event.currentTarget.value)} /></label>
        {pair.length === 2
          ? <a class="button" href={href(["compare", ...pair])}>Compare the two</a>
          : <span class="hint">Tick two runs to compare them.</span>}
      </form>
      {value.runs.length === 0
        ? <p class="banner">There is no run yet. Start one: <code>rolloutctl run job.yaml</code></p>
        : shown.length === 0 && <p class="banner">No run fits.</p>}
      <div class="scroll" tabIndex={0} role="region" aria-label="Runs">
        <table id="runs">
          <thead><tr>
            <th scope="col"><span class="hidden">compare</span></th><th scope="col">run</th><th scope="col">state</th><th scope="col">model</th>
            <th scope="col" class="number">tasks</th><th scope="col" class="number">rollouts</th><th scope="col" class="number">mean reward</th>
            <th scope="col" class="number">pass@1</th><th scope="col" class="number">pass@k</th><th scope="col" class="number">masked</th>
            <th scope="col" class="number">tokens</th><th scope="col" class="number">cost</th><th scope="col" class="number">duration</th><th scope="col">started</th>
          </tr></thead>
          <tbody>{shown.map((run) => (
            <tr key={run.folder}>
              <td><input type="checkbox" aria-label={`Compare ${run.folder}`} checked={ticked.includes(run.folder)} onChange={() => tick(run.folder)} /></td>
              <td><a href={runLink(run.folder)}>{run.folder}</a></td>
              <td><State state={run.state} />{(run.aborted ?? run.damaged) && <small class="why" title={run.aborted ?? run.damaged ?? ""}>{run.aborted ?? run.damaged}</small>}</td>
              <td>{run.model || "–"}</td>
              <td class="number">{count(run.tasks)}</td>
              <td class="number">{count(run.sealed)}{run.total !== null && run.sealed < run.total ? ` of ${count(run.total)}` : ""}</td>
              <td class="number">{number(run.mean, 3)}{run.standardError !== null && <small> ± {number(run.standardError, 3)}</small>}</td>
              <td class="number">{percent(run.passAt1)}</td>
              <td class="number">{run.k > 1 ? <span title={`pass@${run.k}`}>{percent(run.passAtK)}</span> : "–"}</td>
              <td class="number">{count(run.masked)}</td>
              <td class="number">{compact(run.tokens)}</td>
              <td class="number">{money(run.cost, run.currency)}</td>
              <td class="number">{seconds(run.duration)}</td>
              <td class="time" title={when(run.created)}>{ago(run.created)}</td>
            </tr>
          ))}</tbody>
        </table>
      </div>
      <p class="hint">{plural(value.runs.length, "run")}, newest first.</p>
    </>
  );
}
