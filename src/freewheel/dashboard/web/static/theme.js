// Dark or light: as the system has it, until somebody chooses; the choice is kept in this browser.

const KEY = "freewheel-theme";
const system = window.matchMedia("(prefers-color-scheme: dark)");

function kept() {
  try { return localStorage.getItem(KEY); } catch { return null; }
}

function apply() {
  const theme = kept() || (system.matches ? "dark" : "light");
  document.documentElement.dataset.theme = theme;
  document.dispatchEvent(new CustomEvent("theme", { detail: theme }));
}

export function toggle() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem(KEY, next); } catch { /* a browser that keeps nothing shows it all the same */ }
  document.documentElement.dataset.theme = next;
  document.dispatchEvent(new CustomEvent("theme", { detail: next }));
}

export function start() {
  system.addEventListener("change", apply);
  apply();
}
