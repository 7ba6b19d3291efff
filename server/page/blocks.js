// The map of the KV blocks: a cell each, in the order of the pages in memory; a cell stands for several if there are
// many, and is larger the more of them are in use. Kinds differ in shape as well as in colour.

import { hatch, prepare } from "./timeline.js";

const KINDS = { u: "used", w: "window", s: "shared", c: "cached", f: "free" };
const MAX_CELL = 15;
const MIN_CELL = 5;

/** "12u5w3s40c900f" as [[12, "used"], …]. Other characters are skipped. */
export function runs(blockMap) {
  return [...blockMap.matchAll(/(\d+)([uwscf])/g)].map(([, count, kind]) => [Number(count), KINDS[kind]]);
}

export function totals(blockMap) {
  const found = { used: 0, window: 0, shared: 0, cached: 0, free: 0 };
  for (const [count, kind] of runs(blockMap)) found[kind] += count;
  return found;
}

export class BlockMap {
  /** colours  () → {used, window, shared, cached, free, ground} */
  constructor(canvas, colours) {
    this.canvas = canvas;
    this.colours = colours;
  }

  /** Returns how many blocks a cell stands for. */
  draw(blockMap) {
    const { context, width, height } = prepare(this.canvas);
    const blocks = runs(blockMap);
    const numBlocks = blocks.reduce((sum, [count]) => sum + count, 0);
    if (!numBlocks || !width) return 1;
    const [cell, perCell] = layout(numBlocks, width, height);
    const numColumns = Math.floor(width / cell);
    const palette = this.colours();
    const cached = hatch(context, palette.cached, true);
    const most = cell - (cell > 7 ? 2 : 1);
    cellsOf(blocks, perCell).forEach(({ kind, share }, at) => {
      const size = Math.max(2, Math.round(most * Math.sqrt(share)));
      const x = (at % numColumns) * cell + (most - size) / 2;
      const y = Math.floor(at / numColumns) * cell + (most - size) / 2;
      if (kind === "free") {
        context.fillStyle = palette.free;
        context.fillRect(x + size / 2 - 1, y + size / 2 - 1, cell > 7 ? 2 : 1, cell > 7 ? 2 : 1);
      } else if (kind === "cached" && size > 4) {
        context.fillStyle = cached;
        context.fillRect(x, y, size, size);
        context.strokeStyle = palette.cached;
        context.lineWidth = 1;
        context.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
      } else {
        context.fillStyle = palette[kind];
        context.fillRect(x, y, size, size);
        if (kind === "shared" && size > 4) {
          context.fillStyle = palette.ground;
          context.fillRect(x + size * 0.32, y + size * 0.32, size * 0.36, size * 0.36);
        }
      }
    });
    return perCell;
  }
}

/** The largest cells with room for all blocks; at the smallest size, several blocks share a cell. */
function layout(numBlocks, width, height) {
  for (let cell = MAX_CELL; cell >= MIN_CELL; cell -= 1) {
    if (Math.floor(width / cell) * Math.floor(height / cell) >= numBlocks) return [cell, 1];
  }
  const room = Math.floor(width / MIN_CELL) * Math.floor(height / MIN_CELL);
  return [MIN_CELL, Math.ceil(numBlocks / room)];
}

/** Each cell's kind, the most common of its used blocks, and the share of used blocks. */
function cellsOf(blocks, perCell) {
  if (perCell === 1) return blocks.flatMap(([count, kind]) => Array(count).fill({ kind, share: 1 }));
  const found = [];
  let tally = new Map();
  let filled = 0;
  const close = () => {
    const [kind] = [...tally].reduce((best, entry) => (entry[1] > best[1] ? entry : best), ["free", 0]);
    const numTaken = [...tally.values()].reduce((sum, count) => sum + count, 0);
    found.push({ kind, share: kind === "free" ? 1 : numTaken / filled });
    tally = new Map();
    filled = 0;
  };
  for (const [count, kind] of blocks) {
    for (let left = count; left > 0; ) {
      const taken = Math.min(left, perCell - filled);
      if (kind !== "free") tally.set(kind, (tally.get(kind) ?? 0) + taken);
      filled += taken;
      left -= taken;
      if (filled === perCell) close();
    }
  }
  if (filled) close();
  return found;
}
