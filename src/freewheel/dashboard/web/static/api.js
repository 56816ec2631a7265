// What the server is asked for, and what it says by itself.

export const AGAIN_MS = 3000; // after which what failed is tried again

export class Failed extends Error {}

export async function get(path, params = {}) {
  const asked = new URLSearchParams(Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  const text = asked.toString();
  let reply;
  try {
    reply = await fetch(`/api${path}${text ? `?${text}` : ""}`, { headers: { Accept: "application/json" } });
  } catch {
    throw new Failed("The server does not answer: the run, or `freewheel dashboard`, has ended.");
  }
  if (reply.status === 403) throw new Failed("This page's token is no longer known: open the address that was printed last.");
  const found = await reply.json().catch(() => ({}));
  if (!reply.ok) throw new Failed(found.error || `The server replied ${reply.status}.`);
  return found;
}

export const runPath = (id, rest = "") => `/runs/${encodeURIComponent(id)}${rest}`;

/**
 * Follows a run from a cursor on. While nobody looks at the page nothing is asked for; the browser resumes after a break
 * with the id of the last change it saw. A reply that is an error ends that, and it is begun again. Returns what ends it.
 */
export function follow(id, cursor, { change, reload, connected }) {
  let source = null;
  let at = cursor;
  let again;
  const open = () => {
    source = new EventSource(`/api${runPath(id, "/events")}?cursor=${encodeURIComponent(at)}`);
    for (const word of ["open", "alive"]) source.addEventListener(word, () => connected(true));
    source.addEventListener("error", () => {
      connected(false);
      if (source?.readyState !== EventSource.CLOSED) return;
      close();
      again = setTimeout(seen, AGAIN_MS);
    });
    source.addEventListener("change", (event) => {
      at = event.lastEventId;
      change(JSON.parse(event.data));
    });
    source.addEventListener("reload", () => { close(); reload(); });
  };
  const close = () => { clearTimeout(again); source?.close(); source = null; };
  const seen = () => { if (document.hidden) close(); else if (!source) open(); };
  document.addEventListener("visibilitychange", seen);
  seen();
  return () => { document.removeEventListener("visibilitychange", seen); close(); };
}
