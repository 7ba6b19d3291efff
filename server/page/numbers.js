// Numbers as people read them.

/** 1,234 */
export const count = (value) => value.toLocaleString("en-US");

/** 85 ms, 1.24 s, 12.4 s */
export function seconds(value) {
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

/** 85 bytes, 12 KB, 1.2 MB */
export function bytes(value) {
  if (value < 1024) return `${value} bytes`;
  return value < 1 << 20 ? `${Math.round(value / 1024)} KB` : `${(value / (1 << 20)).toFixed(1)} MB`;
}

/** 0, 48.3, 512, 12.3k */
export function rate(value) {
  if (value >= 10000) return `${(value / 1000).toFixed(1)}k`;
  return value >= 100 || value === 0 ? count(Math.round(value)) : value.toFixed(1);
}
