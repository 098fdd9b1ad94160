/* Small charts. Each has its numbers as text for a screen reader. */

import { count, number, percent, seconds } from "./format";
import type { Row, Summary } from "./source";

export function rewardTone(reward: number): string {
  const share = Math.max(0, Math.min(1, reward));
  return share < 0.5
    ? `color-mix(in oklab, var(--mid) ${Math.round(share * 200)}%, var(--bad))`
    : `color-mix(in oklab, var(--good) ${Math.round((share - 0.5) * 200)}%, var(--mid))`;
}

export const tone = (row: Pick<Row, "outcome" | "reward">) =>
  row.outcome !== "Completed" ? "var(--masked)" : row.reward === undefined ? "var(--accent)" : rewardTone(row.reward);

export function Histogram({ histogram }: { histogram: NonNullable<Summary["histogram"]> }) {
  const { low, high, counts } = histogram, last = counts.length - 1, most = Math.max(...counts, 1);
  const reward = (bin: number) => low + ((high - low) * bin) / last;
  return (
    <svg viewBox="0 0 330 150" role="img" aria-label={`Rollouts by reward: ${counts.map((n, i) => `${number(reward(i))}: ${n}`).join(", ")}`}>
      <line x1={0} x2={330} y1={130.5} y2={130.5} />
      {counts.map((amount, bin) => {
        const height = Math.max(amount ? 2 : 0, (108 * amount) / most);
        return (
          <g>
            <rect x={30 * bin + 4} y={130 - height} width={22} height={height} rx={2} style={{ fill: rewardTone(reward(bin)) }} />
            {amount > 0 && <text x={30 * bin + 15} y={125 - height}>{count(amount)}</text>}
            {bin % 2 === 0 && <text x={30 * bin + 15} y={145}>{number(reward(bin))}</text>}
          </g>
        );
      })}
    </svg>
  );
}

export type Curve = { name: string; points: { label: string; mean: number; graded: number }[] };

/** Mean reward by label, in the order of submission; one line for each curve. */
export function Curves({ curves }: { curves: Curve[] }) {
  const means = curves.flatMap((curve) => curve.points.map((point) => point.mean));
  const low = Math.min(0, ...means), high = Math.max(1, ...means);
  const longest = Math.max(...curves.map((curve) => curve.points.length));
  const x = (i: number) => 44 + (longest > 1 ? (1056 * i) / (longest - 1) : 0), y = (mean: number) => 190 - (170 * (mean - low)) / (high - low);
  const told = curves.map((curve) => `${curve.name}: ${curve.points.map((point) => `${point.label} ${number(point.mean, 3)}`).join(", ")}`);
  return (
    <svg viewBox="0 0 1120 220" role="img" aria-label={`Mean reward by label. ${told.join("; ")}`}>
      {[0, 1, 2, 3, 4].map((i) => {
        const mean = low + ((high - low) * i) / 4;
        return <g><line x1={44} x2={1100} y1={y(mean)} y2={y(mean)} /><text x={20} y={y(mean) + 4}>{number(mean)}</text></g>;
      })}
      {curves.map((curve, c) => (
        <g class={`curve curve-${c}`}>
          <polyline points={curve.points.map((point, i) => `${x(i)},${y(point.mean)}`).join(" ")} />
          {curve.points.map((point, i) => (
            <circle cx={x(i)} cy={y(point.mean)} r={4}><title>{`${curve.name}, ${point.label}: ${number(point.mean, 3)} over ${count(point.graded)} graded`}</title></circle>
          ))}
        </g>
      ))}
      {(curves.find((curve) => curve.points.length === longest)?.points ?? []).map((point, i) =>
        i % Math.ceil(longest / 12) === 0 && <text x={Math.min(x(i), 1080)} y={212}>{point.label.length > 12 ? `${point.label.slice(0, 11)}…` : point.label}</text>)}
    </svg>
  );
}

export function Bars({ rows, link }: { rows: { name: string; amount: number; color: string; where: string }[]; link: (where: string) => string }) {
  const most = Math.max(...rows.map((row) => row.amount), 1);
  return (
    <ul class="bars">{rows.map((row) => (
      <li><a href={link(row.where)} title={`Show only ${row.name}`}>
        <span class="label">{row.name}</span>
        <span class="track"><span class="fill" style={{ width: `${((100 * row.amount) / most).toFixed(1)}%`, background: row.color }} /></span>
        <span class="number">{count(row.amount)}</span>
      </a></li>
    ))}</ul>
  );
}

export function Parts({ parts }: { parts: Summary["parts"] }) {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Where the time went">
      <table>
        <thead><tr><th scope="col">part</th><th scope="col" class="number">median</th><th scope="col" class="number">p95</th><th scope="col" class="number">share of all</th></tr></thead>
        <tbody>{parts.map((part) => (
          <tr><td>{part.name}</td><td class="number">{seconds(part.median)}</td><td class="number">{seconds(part.p95)}</td><td class="number">{percent(part.share)}</td></tr>
        ))}</tbody>
      </table>
    </div>
  );
}
