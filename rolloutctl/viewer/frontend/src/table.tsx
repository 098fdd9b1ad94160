/* A table of any length: only the rows in sight are fetched and drawn. */

import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { count } from "./format";

export type Column<R> = { name: string; title: string; right?: boolean; wide?: boolean; meaning?: string; cell: (row: R) => ComponentChildren };

const ROW = 34; // height in pixels, as in app.css
const PAGE = 100;
const VIEW = 600; // pixels
const MARGIN = 10; // rows

type Props<R> = {
  label: string; columns: Column<R>[]; sort: string; descending: boolean; onSort: (name: string) => void;
  /** Names what is fetched; rows of another key are discarded. */
  version: string; where: string;
  fetchPage: (offset: number, limit: number) => Promise<{ count: number; rows: R[] }>;
  link: (row: R) => string; current?: (row: R) => boolean;
};

export function VirtualTable<R extends { index: number }>(props: Props<R>) {
  const view = useRef<HTMLDivElement>(null);
  const [from, setFrom] = useState(0);
  const [total, setTotal] = useState<number | null>(null);
  const [fetched, setFetched] = useState<{ version: string; where: string; pages: Map<number, R[]> }>({ version: "", where: "", pages: new Map() });
  const [problem, setProblem] = useState("");
  const asked = useRef({ version: "", pages: new Set<number>() });

  const first = Math.max(0, from - MARGIN), last = Math.min(total ?? PAGE, from + Math.ceil(VIEW / ROW) + MARGIN);
  useEffect(() => {
    const isNew = asked.current.version !== props.version;
    if (isNew) asked.current = { version: props.version, pages: new Set() };
    const current = asked.current;
    for (let page = Math.floor(first / PAGE); page <= Math.floor(Math.max(first, last - 1) / PAGE); page += 1) {
      if (current.pages.has(page)) continue;
      current.pages.add(page);
      props.fetchPage(page * PAGE, PAGE).then((found) => {
        if (asked.current !== current) return;
        setTotal(found.count);
        setProblem("");
        // Rows of the earlier version stay until the first of the new one are there.
        setFetched((known) => ({
          version: props.version, where: props.where,
          pages: new Map([...(known.version === props.version ? known.pages : []), [page, found.rows]]),
        }));
      }, (error: Error) => { current.pages.delete(page); setProblem(error.message); });
    }
  }, [props.version, first, last]);

  useLayoutEffect(() => {
    const element = view.current!;
    const look = () => setFrom(Math.floor(element.scrollTop / ROW));
    element.addEventListener("scroll", look, { passive: true });
    return () => element.removeEventListener("scroll", look);
  }, []);

  useLayoutEffect(() => { view.current!.scrollTop = 0; setFrom(0); }, [props.where]);

  const rows: ComponentChildren[] = [];
  for (let number = first; number < (total === null ? 0 : last); number += 1) {
    const row = fetched.pages.get(Math.floor(number / PAGE))?.[number % PAGE];
    rows.push(
      <tr key={number} aria-rowindex={number + 2} class={row && props.current?.(row) ? "current" : undefined}>
        {props.columns.map((column, position) => {
          const style = [column.right && "number", column.wide && "wide"].filter(Boolean).join(" ") || undefined;
          const content = row ? column.cell(row) : "";
          return <td class={style}>{position === 0 && row ? <a href={props.link(row)}>{content}</a> : content}</td>;
        })}
      </tr>,
    );
  }
  return (
    <>
      <p class="hint" role="status">{problem || (total === null ? "Reading…" : `${count(total)} rollouts`)}</p>
      <div class="scroll virtual" ref={view} data-where={fetched.pages.has(Math.floor(first / PAGE)) ? fetched.where : undefined} tabIndex={0} role="region" aria-label={props.label} style={{ maxHeight: `${VIEW}px` }}>
        <table aria-rowcount={(total ?? 0) + 1}>
          <thead>
            <tr>{props.columns.map((column) => {
              const isSorted = column.name === props.sort;
              return (
                <th scope="col" class={column.right ? "number" : undefined} aria-sort={isSorted ? (props.descending ? "descending" : "ascending") : "none"}>
                  <button type="button" title={column.meaning} onClick={() => { view.current!.scrollTop = 0; props.onSort(column.name); }}>
                    {column.title}{isSorted ? (props.descending ? " ↓" : " ↑") : ""}
                  </button>
                </th>
              );
            })}</tr>
          </thead>
          <tbody>
            {first > 0 && <tr aria-hidden="true" class="space"><td colSpan={props.columns.length} style={{ height: `${first * ROW}px` }} /></tr>}
            {rows}
            {total !== null && last < total && <tr aria-hidden="true" class="space"><td colSpan={props.columns.length} style={{ height: `${(total - last) * ROW}px` }} /></tr>}
          </tbody>
        </table>
      </div>
    </>
  );
}
