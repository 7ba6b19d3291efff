// The browser's storage for this page, which may be switched off, or full: then nothing is found, and nothing is kept.

/** area  "localStorage", or "sessionStorage": for this tab only */
export function stored(area, key) {
  try {
    return globalThis[area].getItem(key);
  } catch {
    return null;
  }
}

/** Keeps a text, or forgets it where it is empty; returns whether that worked. */
export function keep(area, key, text) {
  try {
    if (text) globalThis[area].setItem(key, text);
    else globalThis[area].removeItem(key);
    return true;
  } catch {
    return false;
  }
}

export function storedKeys(area, prefix) {
  try {
    return Object.keys(globalThis[area]).filter((key) => key.startsWith(prefix));
  } catch {
    return [];
  }
}

/** The value of a JSON text, or null. */
export function parseJson(text) {
  try {
    return JSON.parse(text ?? "null");
  } catch {
    return null;
  }
}
