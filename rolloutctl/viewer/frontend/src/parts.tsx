/* Parts that several pages use. */

import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import type { Source, Summary } from "./source";

export function Tiles({ tiles }: { tiles: ([string, ComponentChildren, ComponentChildren?] | null | false)[] }) {
  const shown = tiles.filter((tile) => tile !== null && tile !== false);
  // More than one row: both have as many tiles, so that none stands alone.
  return (
    <dl class={shown.length > 6 ? "tiles many" : "tiles"} style={{ "--half": Math.ceil(shown.length / 2) }}>{shown.map(([name, value, note]) => (
      <div><dt>{name}</dt><dd>{value}{note && <small>{note}</small>}</dd></div>
    ))}</dl>
  );
}

const TAIL = 14; // characters

/** A task's name. Where it is too long, its end stays visible: names of a dataset often differ only there. */
export function Name({ text }: { text: string }) {
  const at = Math.max(0, text.length - TAIL);
  return <><span class="cut">{text.slice(0, at)}</span>{text.slice(at)}</>;
}

export function Problem({ text }: { text: string }) {
  return <p class="banner problem" role="alert">{text}</p>;
}

const TONES: Record<string, string> = {
  finished: "good", running: "live", unfinished: "mid", aborted: "bad", "failed to start": "bad", damaged: "bad",
};

export function State({ state }: { state: string }) {
  return <span class={`state state-${TONES[state] ?? "mid"}`}>{state}</span>;
}

export function Copy({ text, label, isPlain = false }: { text: string; label: string; isPlain?: boolean }) {
  const [isDone, setDone] = useState(false);
  useEffect(() => { if (isDone) { const timer = setTimeout(() => setDone(false), 2000); return () => clearTimeout(timer); } }, [isDone]);
  return (
    <button type="button" class={isPlain ? "copy plain" : "copy"} title={text} onClick={async () => {
      try {
        await navigator.clipboard.writeText(text);
        setDone(true);
      } catch {
        prompt("Copy this:", text); // the browser gives no access to the clipboard
      }
    }}>{isDone ? "Copied" : label}</button>
  );
}

/** The command that resumes a run, where one began it. */
export function Resume({ summary }: { summary: Summary }) {
  return summary.command === null ? null : <Copy label="Copy: resume" text={summary.command} />;
}

/** What a promise gives; asked for again if a dependency changes. The earlier value stays until the new one is there. */
export function useAsync<T>(ask: () => Promise<T>, dependencies: unknown[]): { value: T | null; problem: string } {
  const [found, setFound] = useState<{ value: T | null; problem: string }>({ value: null, problem: "" });
  useEffect(() => {
    let isOver = false;
    ask().then((value) => { if (!isOver) setFound({ value, problem: "" }); },
      (error: Error) => { if (!isOver) setFound({ value: null, problem: error.message }); });
    return () => { isOver = true; };
  }, dependencies);
  return found;
}

const LOOK_MILLISECONDS = 1000;

/** Like useAsync. Asks again after each answer, while `isLive`. */
export function useFollowed<T>(ask: () => Promise<T>, dependencies: unknown[], isLive: (value: T | null) => boolean): { value: T | null; problem: string } {
  const [look, setLook] = useState(0);
  const found = useAsync(ask, [...dependencies, look]);
  const isAskedAgain = isLive(found.value);
  useEffect(() => {
    if (!isAskedAgain) return;
    const timer = setTimeout(() => setLook((n) => n + 1), LOOK_MILLISECONDS);
    return () => clearTimeout(timer);
  }, [found, isAskedAgain]);
  return found;
}

export function useSummary(source: Source, run: string): { summary: Summary | null; problem: string } {
  const [found, setFound] = useState<{ summary: Summary | null; problem: string }>({ summary: null, problem: "" });
  useEffect(() => {
    setFound({ summary: null, problem: "" });
    return source.follow(run, (summary) => setFound({ summary, problem: "" }), (problem) => setFound({ summary: null, problem }));
  }, [source, run]);
  return found;
}

/** Whether a key belongs to a field that is typed into, or to the browser. */
export const isTyping = (event: KeyboardEvent) =>
  event.ctrlKey || event.metaKey || event.altKey || (event.target as HTMLElement).matches?.("input, textarea, select");

export function useKeys(keys: Record<string, () => void>) {
  useEffect(() => {
    const pressed = (event: KeyboardEvent) => {
      const act = keys[event.key];
      if (!act || isTyping(event)) return;
      event.preventDefault();
      act();
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  });
}

export function useTitle(title: string) {
  useEffect(() => { document.title = `${title} · agent-rollouts`; }, [title]);
}
