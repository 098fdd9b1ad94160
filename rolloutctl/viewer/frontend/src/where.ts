/* Filters such as `reward < 0.5 and tag == "hard" and tools > 20`. A plain word is looked up in the texts of a rollout.
   The server translates a parsed condition to SQL (viewer/where.py); the report evaluates it here. */

export type Value = string | number | boolean | null;
export type Condition =
  | { op: "and" | "or"; terms: Condition[] }
  | { op: "not"; term: Condition }
  | { op: "text"; value: string }
  | { op: Comparison; field: string; value: Value };
export type Comparison = "==" | "!=" | "<" | "<=" | ">" | ">=" | "in";
export type Field = { name: string; kind: "number" | "text" | "boolean" | "list"; meaning: string };
export type Values = Record<string, unknown>;

export class WrongFilter extends Error {}

const TOKEN = /\s*(?:("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(==|!=|<=|>=|<|>|=)|([()])|([^\s()=<>!"']+)|(.))/y;
const WORDS = new Set(["and", "or", "not", "in"]);
const CONSTANTS: Record<string, Value> = { true: true, false: false, none: null, null: null };
const TEXT_FIELDS = ["task", "tag", "ended", "reason", "message", "error", "label"];

type Token = { kind: "string" | "operator" | "bracket" | "word"; text: string };

function tokens(text: string): Token[] {
  const found: Token[] = [];
  TOKEN.lastIndex = 0;
  while (text.slice(TOKEN.lastIndex).trim()) {
    const match = TOKEN.exec(text);
    if (!match) break;
    const [, quoted, operator, bracket, word, other] = match;
    if (quoted !== undefined) found.push({ kind: "string", text: quoted.slice(1, -1).replace(/\\(.)/g, "$1") });
    else if (operator !== undefined) found.push({ kind: "operator", text: operator === "=" ? "==" : operator });
    else if (bracket !== undefined) found.push({ kind: "bracket", text: bracket });
    else if (word !== undefined) found.push({ kind: "word", text: word });
    else throw new WrongFilter(`${other} does not belong here; put a text with it in quotes`);
  }
  return found;
}

export function parse(text: string, fields: Field[]): Condition | null {
  const listed = tokens(text);
  if (!listed.length) return null;
  const byName = new Map(fields.map((field) => [field.name.toLowerCase(), field]));
  let at = 0;
  const peek = () => listed[at];
  const isWord = (word: string) => peek()?.kind === "word" && peek()!.text.toLowerCase() === word;

  function anyOf(): Condition {
    const terms = [allOf()];
    while (isWord("or")) { at += 1; terms.push(allOf()); }
    return terms.length > 1 ? { op: "or", terms } : terms[0]!;
  }

  function allOf(): Condition {
    const terms = [one()];
    // Two words beside each other must both be found.
    while (peek() && !isWord("or") && peek()!.text !== ")") {
      if (isWord("and")) at += 1;
      terms.push(one());
    }
    return terms.length > 1 ? { op: "and", terms } : terms[0]!;
  }

  function one(): Condition {
    const token = peek();
    if (!token) throw new WrongFilter("the filter ends too early");
    if (isWord("not")) { at += 1; return { op: "not", term: one() }; }
    if (token.kind === "bracket") {
      if (token.text === ")") throw new WrongFilter("a ) without a (");
      at += 1;
      const inner = anyOf();
      if (peek()?.text !== ")") throw new WrongFilter("a ) is missing");
      at += 1;
      return inner;
    }
    if (token.kind === "operator" || (token.kind === "word" && WORDS.has(token.text.toLowerCase())))
      throw new WrongFilter(`${token.text} needs something before it`);
    at += 1;
    const next = peek();
    if (next?.kind === "operator") {
      at += 1;
      const field = known(token.text);
      return { op: next.text as Comparison, field: field.name, value: value(field) };
    }
    if (next && isWord("in")) {
      at += 1;
      const name = peek();
      if (!name) throw new WrongFilter("in needs a field after it");
      at += 1;
      return { op: "in", field: known(name.text).name, value: token.text };
    }
    return { op: "text", value: token.text };
  }

  function known(name: string): Field {
    const field = byName.get(name.toLowerCase());
    if (!field) throw new WrongFilter(`${name} is not a field; the fields are ${fields.map((f) => f.name).join(", ")}`);
    return field;
  }

  function value(field: Field): Value {
    const token = peek();
    if (!token || token.kind === "operator" || token.kind === "bracket") throw new WrongFilter(`${field.name} needs a value`);
    at += 1;
    if (token.kind === "word" && token.text.toLowerCase() in CONSTANTS) return CONSTANTS[token.text.toLowerCase()]!;
    if (field.kind === "number") {
      const number = Number(token.text);
      if (token.text.trim() === "" || !Number.isFinite(number)) throw new WrongFilter(`${field.name} is a number, and ${token.text} is none`);
      return number;
    }
    if (field.kind === "boolean") throw new WrongFilter(`${field.name} is true or false`);
    return token.text;
  }

  const condition = anyOf();
  if (peek()) throw new WrongFilter(`${peek()!.text} does not belong here`);
  return condition;
}

// As SQLite's lower().
const lower = (text: string) => text.replace(/[A-Z]/g, (letter) => letter.toLowerCase());

export function fits(where: Condition | null, row: Values): boolean {
  if (where === null) return true;
  switch (where.op) {
    case "and": return where.terms.every((term) => fits(term, row));
    case "or": return where.terms.some((term) => fits(term, row));
    case "not": return !fits(where.term, row);
    case "text": return lower(TEXT_FIELDS.map((name) => String(row[name] ?? "")).join("\n")).includes(lower(where.value));
  }
  const actual = row[where.field] ?? null, { value } = where;
  if (Array.isArray(actual)) {
    const has = actual.includes(value);
    return where.op === "==" || where.op === "in" ? has : where.op === "!=" ? !has : false;
  }
  switch (where.op) {
    case "==": return actual === value;
    case "!=": return actual !== value;
    case "in": return lower(String(actual ?? "")).includes(lower(String(value)));
  }
  if (actual === null || value === null || typeof actual !== typeof value) return false;
  switch (where.op) {
    case "<": return (actual as number) < (value as number);
    case "<=": return (actual as number) <= (value as number);
    case ">": return (actual as number) > (value as number);
    case ">=": return (actual as number) >= (value as number);
  }
}

export const quoted = (text: string) => `"${text.replace(/["\\]/g, "\\$&")}"`;
