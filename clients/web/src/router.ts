// Views by the fragment of the address: `#/runs/run-1`.

import { signal } from "@preact/signals";

export interface Place {
  view: string;
  id: string;
}

function read(): Place {
  const [view = "", ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  return { view: view || "runs", id: decodeURIComponent(rest.join("/")) };
}

export const place = signal<Place>(read());

window.addEventListener("hashchange", () => {
  place.value = read();
  // A reader with a keyboard or without sight begins at the heading of the new view.
  queueMicrotask(() => document.querySelector<HTMLElement>("main")?.focus());
});

export function link(view: string, id = ""): string {
  return `#/${view}${id ? `/${encodeURIComponent(id)}` : ""}`;
}
