/* The address of a page is in the URL's hash, so that pages have addresses in a file too. */

import { useEffect, useState } from "preact/hooks";

export type Route = { path: string[]; query: URLSearchParams };

export function parseHash(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const parts = path.split("/").filter(Boolean).map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
  return { path: parts, query: new URLSearchParams(query) };
}

export const href = (path: (string | number)[], query: Record<string, string | null> = {}) => {
  const given = Object.entries(query).filter((entry): entry is [string, string] => Boolean(entry[1]));
  const text = new URLSearchParams(given).toString();
  return `#/${path.map((part) => encodeURIComponent(part)).join("/")}${text ? `?${text}` : ""}`;
};

export const runLink = (run: string, query: Record<string, string | null> = {}) => href(["run", run], query);
export const rolloutLink = (run: string, index: number, query: Record<string, string | null> = {}) =>
  href(["run", run, "rollout", index], query);

export function useRoute(): Route {
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const changed = () => setHash(location.hash);
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return parseHash(hash);
}

/** Changes the query of the address without a new entry in the history. */
export function setQuery(changes: Record<string, string | null>) {
  const { path, query } = parseHash(location.hash);
  for (const [name, value] of Object.entries(changes)) if (value) query.set(name, value); else query.delete(name);
  history.replaceState(null, "", href(path, Object.fromEntries(query)));
  dispatchEvent(new HashChangeEvent("hashchange"));
}
