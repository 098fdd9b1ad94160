import { render } from "preact";
import { useMemo } from "preact/hooks";
import { CompareRollouts, CompareRuns } from "./compare";
import { Problem, useKeys } from "./parts";
import { href, useRoute } from "./router";
import { Rollout } from "./rollout";
import { Run } from "./run";
import { Runs } from "./runs";
import { openSource, type Source } from "./source";

function App() {
  const source = useMemo(openSource, []);
  useKeys({ "/": () => document.querySelector<HTMLInputElement>("#filter")?.focus() });
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => { event.preventDefault(); document.getElementById("main")?.focus(); }}>Skip to the content</a>
      <main id="main" tabIndex={-1}><Page source={source} /></main>
      <footer><p>Keys: <kbd>/</kbd> filter or search, <kbd>j</kbd> <kbd>k</kbd> next and previous rollout, <kbd>n</kbd> <kbd>p</kbd> next and previous turn, <kbd>e</kbd> first error, <kbd>v</kbd> verdict, <kbd>u</kbd> up.</p></footer>
    </>
  );
}

function Page({ source }: { source: Source }) {
  const { path } = useRoute();
  const [page, first, ...rest] = path;
  if (page === undefined || page === "runs") return source.isServer ? <Runs source={source} /> : <Run source={source} run="" />;
  if (page === "run" && first !== undefined) {
    if (rest.length === 0) return <Run source={source} run={first} />;
    const index = Number(rest[1]);
    if (rest[0] === "rollout" && rest.length === 2 && Number.isSafeInteger(index)) return <Rollout key={`${first}/${index}`} source={source} run={first} index={index} />;
  }
  if (page === "compare" && first !== undefined && rest.length === 1) return <CompareRuns source={source} before={first} after={rest[0]!} />;
  if (page === "compare" && first !== undefined && rest.length === 3)
    return <CompareRollouts source={source} before={[first, Number(rest[0])]} after={[rest[1]!, Number(rest[2])]} />;
  return <><Problem text="There is no such page." /><p><a href={href(["runs"])}>All runs</a></p></>;
}

render(<App />, document.getElementById("app")!);
