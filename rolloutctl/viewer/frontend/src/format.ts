/* Words and numbers as the pages show them. */

export const number = (value: number | null | undefined, digits = 2) =>
  value === null || value === undefined ? "–" : Number(value.toFixed(digits)).toString();

export const count = (value: number | null | undefined) => (value === null || value === undefined ? "–" : value.toLocaleString("en-US"));

export const percent = (share: number | null | undefined) =>
  share === null || share === undefined ? "–" : `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;

export function compact(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  for (const [size, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]] as const)
    if (value >= size) return `${number(value / size, value >= 100 * size ? 0 : 1)} ${letter}`;
  return String(value);
}

export function seconds(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${Math.round(value * 1000)} ms`;
  if (value < 9.95) return `${value.toFixed(1)} s`;
  if (value < 119.5) return `${Math.round(value)} s`;
  if (value < 7170) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export const ago = (from: number, now = Date.now() / 1000) => (now - from < 1 ? "now" : `${seconds(now - from)} ago`);

export const when = (unix: number | null | undefined) =>
  unix ? new Date(unix * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" }) : "–";

export const money = (value: number | null | undefined, currency: string | null | undefined) =>
  value === null || value === undefined ? "–" : `${value < 1 ? value.toFixed(4) : value.toFixed(2)} ${currency ?? ""}`.trim();

export const bytes = (value: number) =>
  value < 1000 ? `${value} B` : value < 1e6 ? `${number(value / 1e3, 1)} kB` : `${number(value / 1e6, 1)} MB`;

export const plural = (amount: number, one: string, many = `${one}s`) => `${count(amount)} ${amount === 1 ? one : many}`;
