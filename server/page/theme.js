// A classic script in the head, so that a chosen theme is there before the first paint.
"use strict";
try {
  const theme = localStorage.getItem("xserv.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // storage is switched off: use the system's theme
}
