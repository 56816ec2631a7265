// Dark or light theme: follows the system until the user chooses one. The choice is stored in this browser.

const KEY = "freewheel-theme";
const system = window.matchMedia("(prefers-color-scheme: dark)");

function readStored() {
  try { return localStorage.getItem(KEY); } catch { return null; }
}

function apply(theme) {
  document.documentElement.dataset.theme = theme;
  document.dispatchEvent(new CustomEvent("theme", { detail: theme }));
}

function applyCurrent() {
  apply(readStored() || (system.matches ? "dark" : "light"));
}

export function toggle() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem(KEY, next); } catch { /* without storage the choice lasts until the page is reloaded */ }
  apply(next);
}

export function start() {
  system.addEventListener("change", applyCurrent);
  applyCurrent();
}
