/* Text of models and tools. It is hostile: it becomes text nodes and a few known elements, never markup. Markdown is read
   into tokens, from which elements are made; HTML, images and scripts in it stay text. Links ask before they leave. */

import Anser from "anser";
import { Lexer, type Token, type Tokens } from "marked";
import { createContext, Fragment, type ComponentChildren } from "preact";
import { useContext, useMemo, useState } from "preact/hooks";
import { count } from "./format";

/** What is searched for, in lower case; empty for nothing. */
export const Search = createContext("");

const COLOUR = /\x1b\[[0-9;]*m/g;
const FOLDED_LINES = 24;
const FOLDED_CHARACTERS = 4000;

export function Marked({ text }: { text: string }) {
  const search = useContext(Search);
  if (!search) return <>{text}</>;
  const parts: ComponentChildren[] = [], lower = text.toLowerCase();
  let from = 0;
  for (let at = lower.indexOf(search); at >= 0; at = lower.indexOf(search, from)) {
    parts.push(text.slice(from, at), <mark>{text.slice(at, at + search.length)}</mark>);
    from = at + search.length;
  }
  return <>{parts}{text.slice(from)}</>;
}

/** Text in a fixed-width font, with the colours that programs gave it. */
export function Ansi({ text }: { text: string }) {
  const parts = useMemo(() => (text.includes("\x1b[") ? Anser.ansiToJson(text, { json: true, remove_empty: true, use_classes: true }) : null), [text]);
  if (!parts) return <Marked text={text} />;
  return <>{parts.map((part) => {
    const classes = [part.fg && `fg-${name(part.fg)}`, part.bg && `bg-${name(part.bg)}`, ...part.decorations.map((d) => `deco-${d}`)];
    return <span class={classes.filter(Boolean).join(" ")}><Marked text={part.content} /></span>;
  })}</>;
}

// Classes such as ansi-red; of 256 colours and of true colours only the sixteen named ones are drawn.
const name = (color: string) => color.replace(/[^a-z-]/g, "");

export function Block({ text, label, error = false, folded = true }: { text: string; label?: string; error?: boolean; folded?: boolean }) {
  const [isOpen, setOpen] = useState(false);
  const search = useContext(Search);
  const lines = text.split("\n");
  const isLong = folded && (lines.length > FOLDED_LINES || text.length > FOLDED_CHARACTERS);
  const shown = isLong && !isOpen && !search ? lines.slice(0, FOLDED_LINES).join("\n").slice(0, FOLDED_CHARACTERS) : text;
  return (
    <div class={error ? "block error" : "block"}>
      {label && <div class="block-label">{label}</div>}
      <pre tabIndex={0} aria-label={label ?? "text"}><Ansi text={shown} /></pre>
      {isLong && !search && (
        <button type="button" class="plain" onClick={() => setOpen(!isOpen)}>
          {isOpen ? "Show less" : `Show all ${count(lines.length)} lines`}
        </button>
      )}
    </div>
  );
}

/** The text of a message. Only models write Markdown: in others, spaces and signs such as `_` and `*` mean themselves. */
export function MessageText({ role, text, isPlain = false }: { role: string; text: string; isPlain?: boolean }) {
  return role.startsWith("assistant") && !isPlain ? <Markdown text={text} /> : <Block text={text} />;
}

function Markdown({ text }: { text: string }) {
  const parsed = useMemo(() => {
    try {
      return new Lexer({ gfm: true }).lex(text.replace(COLOUR, ""));
    } catch {
      return null;
    }
  }, [text]);
  return <div class="markdown">{parsed ? <Blocks tokens={parsed} /> : <pre><Marked text={text} /></pre>}</div>;
}

function Blocks({ tokens }: { tokens: Token[] }) {
  return <>{tokens.map((token) => <BlockOf token={token} />)}</>;
}

function BlockOf({ token }: { token: Token }): ComponentChildren {
  switch (token.type) {
    case "space": return null;
    case "hr": return <hr />;
    // The page has headings of its own; those of a message must not be among them for a screen reader.
    case "heading": return <p class={`heading heading-${(token as Tokens.Heading).depth}`}><Inline tokens={token.tokens!} /></p>;
    case "paragraph": return <p><Inline tokens={token.tokens!} /></p>;
    case "code": return <pre tabIndex={0} aria-label="code"><Ansi text={token.text} /></pre>;
    case "blockquote": return <blockquote><Blocks tokens={token.tokens!} /></blockquote>;
    case "list": {
      const list = token as Tokens.List;
      const items = list.items.map((item) => (
        <li>{item.task && <span aria-label={item.checked ? "done" : "open"}>{item.checked ? "☑ " : "☐ "}</span>}<Blocks tokens={item.tokens} /></li>
      ));
      return list.ordered ? <ol start={list.start || 1}>{items}</ol> : <ul>{items}</ul>;
    }
    case "table": {
      const table = token as Tokens.Table;
      return (
        <div class="scroll" tabIndex={0} role="region" aria-label="table"><table>
          <thead><tr>{table.header.map((cell) => <th scope="col"><Inline tokens={cell.tokens} /></th>)}</tr></thead>
          <tbody>{table.rows.map((row) => <tr>{row.map((cell) => <td><Inline tokens={cell.tokens} /></td>)}</tr>)}</tbody>
        </table></div>
      );
    }
    case "text": return "tokens" in token && token.tokens ? <Inline tokens={token.tokens} /> : <Marked text={token.text} />;
    default: return <p class="verbatim"><Marked text={token.raw} /></p>;
  }
}

function Inline({ tokens }: { tokens: Token[] }) {
  return <>{tokens.map((token) => <InlineOf token={token} />)}</>;
}

function InlineOf({ token }: { token: Token }): ComponentChildren {
  switch (token.type) {
    case "strong": return <strong><Inline tokens={token.tokens!} /></strong>;
    case "em": return <em><Inline tokens={token.tokens!} /></em>;
    case "del": return <del><Inline tokens={token.tokens!} /></del>;
    case "codespan": return <code><Marked text={token.text} /></code>;
    case "br": return <br />;
    case "escape": return <Marked text={token.text} />;
    case "link": return <Link url={token.href}><Inline tokens={token.tokens!} /></Link>;
    case "image": return <span class="verbatim"><Marked text={token.raw} /></span>;
    case "text": return "tokens" in token && token.tokens ? <Inline tokens={token.tokens} /> : <Marked text={token.text} />;
    default: return <Marked text={token.raw} />;
  }
}

/** Only web addresses are links. Following one asks first, and tells the other site nothing. */
function Link({ url, children }: { url: string; children: ComponentChildren }) {
  if (!/^https?:\/\//i.test(url)) return <Fragment>{children} <span class="verbatim">({url})</span></Fragment>;
  return (
    <a href={url} rel="noopener noreferrer nofollow" target="_blank" title={url} onClick={(event) => {
      if (!confirm(`A model or tool wrote this link. It leads to\n\n${url}\n\nOpen it?`)) event.preventDefault();
    }}>{children}</a>
  );
}
