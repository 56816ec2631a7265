// Requests to the server, and the stream of changes it sends.

export const RETRY_MS = 3000; // delay before a failed request is retried

export class RequestError extends Error {}

export async function get(path, params = {}) {
  const query = new URLSearchParams(Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== "")).toString();
  let reply;
  try {
    reply = await fetch(`/api${path}${query ? `?${query}` : ""}`, { headers: { Accept: "application/json" } });
  } catch {
    throw new RequestError("The server does not respond. The run, or `freewheel dashboard`, has ended.");
  }
  if (reply.status === 403) throw new RequestError("This page's token is no longer valid. Open the most recently printed address.");
  const data = await reply.json().catch(() => ({}));
  if (!reply.ok) throw new RequestError(data.error || `The server replied with status ${reply.status}.`);
  return data;
}

export const runPath = (id, rest = "") => `/runs/${encodeURIComponent(id)}${rest}`;

/**
 * Follow the changes of a run, starting at a cursor. Returns a function that stops.
 *
 * Nothing is requested while the page is hidden. After a short break the browser resumes with the id of the last change it
 * received. An error reply closes the stream; it is reopened after RETRY_MS.
 */
export function follow(id, cursor, { change, reload, connected }) {
  let source = null;
  let lastCursor = cursor;
  let retryTimer;
  const open = () => {
    source = new EventSource(`/api${runPath(id, "/events")}?cursor=${encodeURIComponent(lastCursor)}`);
    for (const name of ["open", "alive"]) source.addEventListener(name, () => connected(true));
    source.addEventListener("error", () => {
      connected(false);
      if (source?.readyState !== EventSource.CLOSED) return;
      close();
      retryTimer = setTimeout(openIfVisible, RETRY_MS);
    });
    source.addEventListener("change", (event) => {
      lastCursor = event.lastEventId;
      change(JSON.parse(event.data));
    });
    source.addEventListener("reload", () => { close(); reload(); });
  };
  const close = () => { clearTimeout(retryTimer); source?.close(); source = null; };
  const openIfVisible = () => { if (document.hidden) close(); else if (!source) open(); };
  document.addEventListener("visibilitychange", openIfVisible);
  openIfVisible();
  return () => { document.removeEventListener("visibilitychange", openIfVisible); close(); };
}
